"""What the ingress makes of its numbers: rates, quantiles, events, the line of statistics."""

import logging
import re
from importlib.resources import files
from typing import Any

import pytest

from api.operations.cluster_events import ClusterEvents
from api.operations.pulse import Pulse
from api.operations.traffic import METRICS, Traffic, quantile
from router.cost import Cost
from telemetry import metrics
from telemetry.metrics import Metrics
from telemetry.prometheus_sink import PrometheusSink
from tests.fake_router import FakeRouter
from tests.fakes import FakeClock

INF = float("inf")


def test_a_quantile_is_where_prometheus_would_put_it() -> None:
    buckets = [(0.1, 0.0), (0.2, 50.0), (0.4, 100.0), (INF, 100.0)]
    assert quantile(buckets, 0.5) == pytest.approx(0.2)
    assert quantile(buckets, 0.75) == pytest.approx(0.3)
    assert quantile([(0.1, 1.0), (INF, 2.0)], 0.95) == 0.1
    assert quantile([(0.1, 0.0), (INF, 0.0)], 0.5) is None
    assert quantile([], 0.5) is None


def test_rates_are_of_the_last_ten_seconds_and_quantiles_of_the_last_sixty() -> None:
    sink, traffic, few = PrometheusSink(), Traffic(), Traffic()
    facade = Metrics(sink)
    traffic.take(sink.samples(), now_s=0.0)
    few.take(sink.samples(METRICS), now_s=0.0)
    for second in range(1, 101):
        if second <= 50:
            facade.observe(metrics.TIME_TO_FIRST_TOKEN, 0.03)
        else:
            facade.observe(metrics.TIME_TO_FIRST_TOKEN, 9.0)
        for _ in range(4):
            facade.observe(metrics.INTER_TOKEN_LATENCY, 0.02)
        facade.add(metrics.REQUESTS_FINISHED, finish_reason="stop" if second % 10 else "error")
        facade.add(metrics.PROMPT_TOKENS, 30.0, source="computed")
        facade.add(metrics.PROMPT_TOKENS, 10.0, source="cached_decode")
        traffic.take(sink.samples(), now_s=float(second))
        few.take(sink.samples(METRICS), now_s=float(second))
    told = traffic.summary()
    assert few.summary() == told  # the metrics that are read are all it needs
    assert told.requests_per_s == pytest.approx(1.0)
    assert told.output_tokens_per_s == pytest.approx(5.0)
    assert told.prompt_tokens_per_s == pytest.approx(40.0)
    assert told.cache_hit_share == pytest.approx(0.25)
    assert told.error_share == pytest.approx(0.1)
    assert told.first_token_p95_s is not None
    assert told.first_token_p95_s > 7.5
    assert told.inter_token_p50_s == pytest.approx(0.0175, abs=0.01)
    assert not told.is_idle


def test_without_traffic_nothing_is_claimed() -> None:
    told = Traffic().summary()
    assert told.is_idle
    assert (told.error_share, told.first_token_p50_s, told.cache_hit_share) == (None, None, None)


def status(*workers: tuple[str, str], link: str = "ready") -> dict[str, Any]:
    return {
        "state": "ready",
        "workers": [
            {
                "id": name,
                "pool": name.partition("-")[0],
                "state": state,
                "running": 0,
                "waiting": 0,
                "kv": {},
                "links": [{"peer": "prefill-0", "state": link}] if state == "ready" else [],
            }
            for name, state in workers
        ],
    }


def told(events: ClusterEvents) -> list[tuple[str, str]]:
    return [(each["level"], each["text"]) for each in events.newest_first()]


def test_each_change_is_told_once() -> None:
    events = ClusterEvents(clock=lambda: 1.0)
    events.update(status(("decode-0", "starting")))
    events.update(status(("decode-0", "ready")))
    events.update(status(("decode-0", "ready")))
    events.update(status(("decode-0", "ready"), link="broken"))
    assert told(events) == [
        ("bad", "link prefill-0 to decode-0 is broken"),
        ("good", "link prefill-0 to decode-0 is ready"),
        ("good", "decode-0 is ready"),
        ("info", "decode-0 is starting"),
        ("good", "the cluster is ready"),
    ]


def test_a_process_that_took_the_place_of_a_lost_one_speaks_for_it() -> None:
    events = ClusterEvents(clock=lambda: 1.0)
    events.update(status(("decode-0", "ready")))
    events.update(status(("decode-0", "lost")))
    events.update(status(("decode-0", "lost"), ("decode-0", "starting")))
    events.update(status(("decode-0", "lost"), ("decode-0", "ready")))
    found = [text for _, text in told(events) if text.startswith("decode-0")]
    assert found == [
        "decode-0 is ready",
        "decode-0 is starting",
        "decode-0 is lost",
        "decode-0 is ready",
    ]


def test_the_dashboard_draws_every_term_of_the_cost() -> None:
    page = files("api").joinpath("static/dashboard.html").read_text()
    (terms,) = re.findall(r"const TERMS = \{(.*)\}", page)
    drawn = {f"{each.partition(':')[0].strip()}_s" for each in terms.split(",")}
    assert drawn == set(Cost._fields) - {"total_s"}


def pulse(router: FakeRouter, clock: FakeClock) -> tuple[Pulse, PrometheusSink]:
    sink = PrometheusSink()
    return Pulse(router, sink, Metrics(sink), now=clock), sink


def test_gauges_of_workers_and_links_return_to_zero() -> None:
    router, clock = FakeRouter(), FakeClock()
    seen, sink = pulse(router, clock)
    for state, count in (("ready", 1), ("lost", 0)):
        router.status = lambda state=state: status(("decode-0", state))  # type: ignore[method-assign]
        seen.look()
        values = {(each.name, *each.labels.values()): each.value for each in sink.samples()}
        assert values[metrics.WORKERS, "decode", "ready"] == count
        assert values[metrics.LINKS, "ready"] == count


def test_the_line_of_statistics_is_quiet_while_nothing_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router, clock = FakeRouter(), FakeClock()
    seen, _ = pulse(router, clock)
    with caplog.at_level(logging.DEBUG, logger="relevo.stats"):
        for _ in range(21):
            clock.advance(1.0)
            seen.look()
        router.num_waiting = 7
        for _ in range(10):
            clock.advance(1.0)
            seen.look()
    assert [each.levelname for each in caplog.records] == ["DEBUG", "DEBUG", "INFO"]
    assert "7 queued" in caplog.records[-1].message
    assert (seen.num_stats, seen.stats) == (1, caplog.records[-1].message)


async def test_the_last_numbers_are_flushed_when_nobody_looks_any_more() -> None:
    class CountingSink(PrometheusSink):
        num_flushes = 0

        def flush(self) -> None:
            self.num_flushes += 1

    sink = CountingSink()
    seen = Pulse(FakeRouter(), sink, Metrics(sink), now=FakeClock())
    seen.start()
    await seen.stop()
    assert sink.num_flushes == 1
