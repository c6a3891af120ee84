"""What reaches Ray of the numbers that were noted, and when."""

import threading

import pytest

from cluster.ray_metrics import RaySink, TeeSink
from telemetry import metrics
from telemetry.metrics import Instrument, Metrics
from telemetry.prometheus_sink import PrometheusSink

Written = list[tuple[str, float, dict[str, str]]]


class FakeRay:
    """Takes what is written; refuses the metrics named."""

    def __init__(self, *, refused: str = "") -> None:
        self.written: Written = []
        self.registered: list[str] = []
        self.has_written = threading.Event()
        self._refused = refused

    def make_write(self, instrument: Instrument):
        self.registered.append(instrument.name)

        def write(value: float, labels: dict[str, str]) -> None:
            if instrument.name == self._refused:
                raise ValueError("no such metric")
            self.written.append((instrument.name, value, labels))
            self.has_written.set()

        return write

    def total(self, name: str) -> float:
        return sum(value for written, value, _ in self.written if written == name)


def test_nothing_is_written_by_who_notes_and_everything_once_by_a_flush() -> None:
    ray = FakeRay()
    sink = RaySink(ray.make_write)
    facade = Metrics(sink)
    for _ in range(3):
        facade.add(metrics.PROMPT_TOKENS, 5.0, source="computed")
        facade.add(metrics.PROMPT_TOKENS, 1.0, source="cached_decode")
        facade.observe(metrics.INTER_TOKEN_LATENCY, 0.02)
    assert ray.written == []
    facade.flush()
    assert sorted(ray.written, key=repr) == [
        (metrics.INTER_TOKEN_LATENCY, 0.02, {}),
        (metrics.INTER_TOKEN_LATENCY, 0.02, {}),
        (metrics.INTER_TOKEN_LATENCY, 0.02, {}),
        (metrics.PROMPT_TOKENS, 15.0, {"source": "computed"}),
        (metrics.PROMPT_TOKENS, 3.0, {"source": "cached_decode"}),
    ]
    facade.flush()
    assert len(ray.written) == 5
    assert ray.registered.count(metrics.PROMPT_TOKENS) == 1


def test_of_a_gauge_the_last_value_is_written_also_when_it_is_zero() -> None:
    ray = FakeRay()
    facade = Metrics(RaySink(ray.make_write), labels={"pool": "decode", "worker": "decode-0"})
    facade.set(metrics.REQUESTS_RUNNING, 3)
    facade.set(metrics.REQUESTS_RUNNING, 0)
    facade.flush()
    labels = {"pool": "decode", "worker": "decode-0"}
    assert ray.written == [(metrics.REQUESTS_RUNNING, 0, labels)]


def test_gauges_are_set_again_while_nothing_changes() -> None:
    ray = FakeRay()
    sink = RaySink(ray.make_write, period_s=0.0, repeat_s=0.01)
    sink.set(metrics.ROUTER_WAITING_REQUESTS, 3, {})
    sink.add(metrics.GENERATION_TOKENS, 1, {})
    sink.start()
    for _ in range(3):
        ray.has_written.clear()
        assert ray.has_written.wait(5.0)
    assert ray.total(metrics.GENERATION_TOKENS) == 1
    assert (metrics.ROUTER_WAITING_REQUESTS, 3, {}) in ray.written[-2:]


def test_the_thread_hands_on_without_new_traffic() -> None:
    ray = FakeRay()
    sink = RaySink(ray.make_write, period_s=0.01)
    sink.start()
    sink.set(metrics.ROUTER_WAITING_REQUESTS, 0, {})
    assert ray.has_written.wait(30.0)
    assert ray.written == [(metrics.ROUTER_WAITING_REQUESTS, 0, {})]


def test_numbers_of_many_threads_all_arrive_once_while_others_flush() -> None:
    ray = FakeRay()
    sink = RaySink(ray.make_write, period_s=0.001)
    sink.start()
    facade = Metrics(TeeSink(PrometheusSink(), sink))

    def write() -> None:
        for number in range(500):
            facade.add(metrics.GENERATION_TOKENS)
            facade.observe(metrics.INTER_TOKEN_LATENCY, 1.0)
            if number % 50 == 0:
                facade.flush()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    facade.flush()
    assert ray.total(metrics.GENERATION_TOKENS) == 2000
    assert ray.total(metrics.INTER_TOKEN_LATENCY) == 2000


def test_what_ray_refuses_is_logged_once_and_keeps_nothing_else_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ray = FakeRay(refused=metrics.GENERATION_TOKENS)
    facade = Metrics(RaySink(ray.make_write))
    for _ in range(2):
        facade.add(metrics.GENERATION_TOKENS)
        facade.add(metrics.MIGRATIONS, cause="lost")
        facade.flush()
    assert len(caplog.records) == 1
    assert ray.total(metrics.MIGRATIONS) == 2


def test_a_flush_that_fails_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(PrometheusSink):
        def flush(self) -> None:
            raise OSError("no agent")

    Metrics(Broken()).flush()
    assert len(caplog.records) == 1
