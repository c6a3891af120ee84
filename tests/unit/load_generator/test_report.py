"""Numbers of a run, and the verdict on them."""

from collections.abc import Sequence
from typing import Any

import pytest

from load_generator.contract import Slo
from load_generator.outcome import Ending, Outcome
from load_generator.percentiles import Values
from load_generator.plan import SLOW
from load_generator.planned_request import PlannedRequest
from load_generator.report import PhaseReport, make_report
from load_generator.run import Run
from load_generator.verdict import check


def outcome(
    ttft_s: float, *gaps_s: float, due_s: float = 100.0, group: str = "", **fields: Any
) -> Outcome:
    request = PlannedRequest(
        due_s=0, body=b"", num_prompt_tokens=5, num_output_tokens=1 + len(gaps_s), group=group
    )
    times = [due_s + ttft_s]
    for gap_s in gaps_s:
        times.append(times[-1] + gap_s)
    known = {"ending": Ending.COMPLETED, "sent_s": due_s + 0.001, "num_attempts": 1, **fields}
    return Outcome(
        request=request, due_s=due_s, token_times_s=times, ended_s=times[-1] + 0.01, **known
    )


def report(outcomes: Sequence[Outcome], slo: Slo | None = None) -> PhaseReport:
    run = Run(outcomes=list(outcomes), started_s=100.0, ended_s=110.0, client_cpu_s=0.001)
    return make_report("phase", run, slo or Slo())


def test_percentiles_are_values_that_were_seen() -> None:
    values = Values(range(1, 101))
    assert [values.at(rank) for rank in (50, 95, 99, 99.9, 100)] == [50, 95, 99, 100, 100]
    assert Values([]).at(50) is None


def test_latencies_are_counted_from_when_a_request_was_due() -> None:
    made = report([outcome(0.5, 0.1, 0.3, sent_s=100.4)])
    assert made.latencies.ttft_ms.at(50) == pytest.approx(500)
    assert made.latencies.tpot_ms.at(50) == pytest.approx(200)
    assert made.latencies.itl_ms.at(100) == pytest.approx(300)
    assert made.latencies.e2e_ms.at(50) == pytest.approx(910)
    assert made.client_lag_ms.at(50) == pytest.approx(400)


def test_a_server_counts_its_tokens_and_else_the_events_count() -> None:
    told = outcome(0.5, 0.1, 0.1, usage={"completion_tokens": 5, "prompt_tokens": 9})
    assert (told.num_output_tokens, told.num_prompt_tokens) == (5, 9)
    assert told.tpot_s == pytest.approx(0.05)  # two tokens came in one event
    silent = outcome(0.5, 0.1, 0.1)
    assert (silent.num_output_tokens, silent.num_prompt_tokens) == (3, 5)
    assert report([told, silent]).num_wrong_counts == 1


def test_a_single_token_has_no_tpot() -> None:
    assert outcome(0.5).tpot_s is None
    assert len(report([outcome(0.5)]).latencies.tpot_ms) == 0


def test_goodput_counts_what_keeps_every_limit() -> None:
    slo = Slo(ttft_ms={"p50": 100, "p99": 600}, tpot_ms={"p90": 150})
    made = report([outcome(0.5, 0.1), outcome(0.7, 0.1), outcome(0.5, 0.2), outcome(0.5)], slo)
    assert (made.num_good, made.num_judged) == (2, 4)
    assert made.goodput_per_s == pytest.approx(0.2)


def test_who_fails_is_no_good_one_and_who_left_is_not_judged() -> None:
    failed = outcome(0.1, ending=Ending.FAILED, error="429: no")
    left = outcome(0.1, ending=Ending.CANCELLED)
    made = report([outcome(0.1), failed, left])
    assert (made.num_completed, made.num_failed, made.num_cancelled) == (1, 1, 1)
    assert made.error_rate == 0.5
    assert made.good_share == 0.5
    assert made.errors == {"429: no": 1}
    assert len(made.latencies.ttft_ms) == 1


def test_slow_readers_spoil_no_latency_but_their_failures_count() -> None:
    slow = outcome(9.0, 9.0, group=SLOW)
    cut = outcome(9.0, group=SLOW, ending=Ending.FAILED)
    made = report([outcome(0.1, 0.1), slow, cut])
    assert made.latencies.ttft_ms.at(100) == pytest.approx(100)
    assert made.groups[SLOW].ttft_ms.at(100) == pytest.approx(9000)
    assert made.error_rate == pytest.approx(1 / 3)


def test_times_that_the_server_tells_are_summed_up() -> None:
    usage = {"completion_tokens": 1, "queue_time": 0.25, "kv_transfer_time": 0, "total": 3}
    made = report([outcome(0.1, usage=usage)])
    assert made.parts_ms["queue_time"].at(50) == 250
    assert set(made.parts_ms) == {"queue_time", "kv_transfer_time"}


def test_every_limit_is_a_line_of_the_verdict() -> None:
    slo = Slo(
        ttft_ms={"p50": 200, "p100": 400}, tpot_ms={"p99": 50}, error_rate=0.0, good_share=0.9
    )
    made = report([outcome(0.1), outcome(0.5)], slo)
    lines = {each.what: (each.value, each.is_met) for each in check(made, slo)}
    assert lines["ttft_ms p50"] == (pytest.approx(100), True)
    assert lines["ttft_ms p100"] == (pytest.approx(500), False)
    assert lines["tpot_ms p99"] == (None, False)  # nothing was measured
    assert lines["error_rate"] == (0, True)
    assert lines["good_share"] == (0.5, False)


def test_plain_data_has_a_row_for_each_request() -> None:
    plain = report([outcome(0.1, 0.1), outcome(0.2, ending=Ending.FAILED, error="x")]).to_dict()
    assert [row["ending"] for row in plain["rows"]] == ["completed", "failed"]
    assert plain["client_cpu_us_per_token"] == pytest.approx(1000 / 3, abs=0.1)
