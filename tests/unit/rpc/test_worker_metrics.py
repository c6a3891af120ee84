"""The series a worker reports."""

from collections.abc import Mapping

from engine.load import BlockCounts, EngineLoad
from rpc.worker_metrics import WorkerMetrics
from telemetry import metrics
from telemetry.prometheus_sink import PrometheusSink


def make_load(*, num_preemptions: int = 0) -> EngineLoad:
    return EngineLoad(
        num_running=3,
        num_waiting=2,
        num_waiting_for_kv=1,
        num_held_requests=0,
        num_waiting_uncached_tokens=10,
        blocks=BlockCounts(free=1, cached=2, used=3, held=4, quarantined=5, total=15),
        prefill_tokens_per_s=100.0,
        step_s=0.01,
        num_preemptions=num_preemptions,
    )


def read(worker_metrics: WorkerMetrics) -> dict[tuple[str, str], float]:
    return {
        (each.name, each.labels.get("state", each.labels.get("reason", ""))): each.value
        for each in worker_metrics.samples()
    }


def test_each_series_names_its_worker_and_says_what_the_load_says() -> None:
    worker_metrics = WorkerMetrics(pool="decode", worker_id="decode-0")
    worker_metrics.set_load(make_load(num_preemptions=2), num_transferring=5)
    values = read(worker_metrics)
    assert values[metrics.REQUESTS_RUNNING, ""] == 3
    assert values[metrics.REQUESTS_TRANSFERRING, ""] == 5
    states = {state: value for (name, state), value in values.items() if name == metrics.KV_BLOCKS}
    assert states == {"free": 1, "cached": 2, "used": 3, "held": 4, "quarantined": 5}
    assert values[metrics.PREEMPTIONS, ""] == 2
    assert all(each.labels["worker"] == "decode-0" for each in worker_metrics.samples())


def test_what_has_not_changed_is_not_told_again() -> None:
    told: list[str] = []

    class Sink(PrometheusSink):
        def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
            told.append(name)

    worker_metrics = WorkerMetrics(pool="decode", worker_id="d", wrap_sink=lambda _: Sink())
    load = make_load()
    worker_metrics.set_load(load, num_transferring=5)
    samples = worker_metrics.samples()
    told.clear()
    worker_metrics.set_load(load, num_transferring=5)
    worker_metrics.raise_to(metrics.PREEMPTIONS, load.num_preemptions)
    assert not told
    assert worker_metrics.samples() is samples
    worker_metrics.set_load(load, num_transferring=6)
    assert told == [metrics.REQUESTS_TRANSFERRING]
    assert worker_metrics.samples() is not samples
    for change in (
        lambda: worker_metrics.observe(metrics.KV_TRANSFER_SECONDS, 0.1),
        lambda: worker_metrics.raise_to(metrics.PREEMPTIONS, 9),
    ):
        samples = worker_metrics.samples()
        change()
        assert worker_metrics.samples() is not samples


def test_totals_counted_elsewhere_are_added_once() -> None:
    worker_metrics = WorkerMetrics(pool="decode", worker_id="decode-0")
    for total in (3, 3, 5):
        worker_metrics.raise_to(metrics.KV_TRANSFER_BYTES, total)
        worker_metrics.raise_each_to(metrics.KV_TRANSFER_FAILURES, "reason", {"timeout": total})
    values = read(worker_metrics)
    assert values[metrics.KV_TRANSFER_BYTES, ""] == 5
    assert values[metrics.KV_TRANSFER_FAILURES, "timeout"] == 5
