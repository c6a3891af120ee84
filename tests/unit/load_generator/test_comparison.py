"""Which of two servers a contract is for."""

import pytest

from cluster.compare_command import AGGREGATED, DISAGGREGATED, assignments_of, serve_command
from cluster.config import load_config
from load_generator.comparison import decide, side_by_side
from load_generator.contract import Contract, make_contract
from load_generator.run import Run
from load_generator.trial import PhaseResult, judge
from tests.unit.load_generator.test_report import outcome

LIMITS = {"ttft_ms": {"p50": 300, "p99": 600}, "tpot_ms": {"p99": 100}}


def contract() -> Contract:
    phase = {"profile": "short-short", "requests": 1, "rate_per_s": 1}
    return make_contract({"model": "m", "slo": LIMITS, "phases": [phase]})


def trial(*ttfts_s: float, tpot_s: float = 0.05) -> list[PhaseResult]:
    run = Run(started_s=100.0, ended_s=110.0)
    run.outcomes += [outcome(ttft_s, tpot_s, tpot_s) for ttft_s in ttfts_s]
    return judge(contract(), [run])


def decided(one: list[PhaseResult], other: list[PhaseResult]) -> tuple[str, str]:
    decision = decide({"together": one, "apart": other})
    return decision.better, decision.reason


def test_who_alone_meets_the_contract_is_the_better() -> None:
    assert decided(trial(0.1, 0.7), trial(0.2, 0.5)) == ("apart", "only apart meets the contract")
    assert decided(trial(0.2, 0.5), trial(0.1, 0.7))[0] == "together"


def test_else_more_requests_within_the_limits() -> None:
    better, reason = decided(trial(0.1, 0.7, 0.7), trial(0.5, 0.5, 0.7))
    assert better == "apart"
    assert "neither meets the contract" in reason
    assert "together 33.3%, apart 66.7%" in reason


def test_else_the_latencies_that_the_contract_limits() -> None:
    better, reason = decided(trial(0.2, 0.4), trial(0.1, 0.2))
    assert better == "apart"
    assert "both meet the contract" in reason
    assert "0.63 times" in reason  # two halves and one equal: the cube root of a quarter
    assert decided(trial(0.1, 0.2), trial(0.2, 0.4))[0] == "together"
    assert decided(trial(0.2, 0.4), trial(0.201, 0.402))[0] == ""


def test_numbers_stand_side_by_side() -> None:
    rows = side_by_side({"together": trial(0.2), "apart": trial(0.1)})
    by_name = {row["what"]: row for row in rows}
    assert by_name["TTFT p50 ms"]["together"] == pytest.approx(200)
    assert by_name["TTFT p50 ms"]["ratio"] == pytest.approx(0.5)


def test_rounds_are_joined_without_the_time_between_them() -> None:
    first, second = (
        Run(started_s=start_s, ended_s=start_s + 10, events=["x"]) for start_s in (100.0, 900.0)
    )
    joined = first.joined(second)
    assert joined.duration_s == 20
    assert joined.events == ["x", "x"]


def test_both_clusters_have_the_same_workers_and_are_valid() -> None:
    both = assignments_of("1:2", ["engine.num_threads=1"])
    for assignments in both.values():
        config = load_config(assignments=assignments, environ={})
        assert config.prefill.replicas + config.decode.replicas == 3
        assert config.engine.num_threads == 1
    assert both[AGGREGATED][0] == "prefill.replicas=0"
    own = assignments_of("1:1", ["router.local_prefill=auto"])
    assert load_config(assignments=own[DISAGGREGATED], environ={}).router.local_prefill == "auto"
    assert load_config(assignments=own[AGGREGATED], environ={}).prefill.replicas == 0


@pytest.mark.parametrize("split", ["1", "0:1", "a:b", "1:1:1"])
def test_a_split_that_is_none_is_told(split: str) -> None:
    with pytest.raises(ValueError, match="expected PREFILL:DECODE"):
        assignments_of(split, [])


def test_a_cluster_is_started_on_ports_of_its_own() -> None:
    command = serve_command(["decode.replicas=2"], http_port=1234, grpc_port=1235)
    assert command[1:] == [
        *("serve", "--set", "decode.replicas=2"),
        *("--set", "ingress.http_port=1234", "--set", "ingress.grpc_port=1235"),
    ]
