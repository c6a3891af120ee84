from dataclasses import replace
from typing import Any

import pytest

from sim.cluster import BlockNamer, ClusterSpec, Kill, Run, SimCluster
from sim.hardware import load_hardware
from sim.policies import POLICIES
from sim.report import Objectives, make_report
from sim.synthetic import Shape, make_trace
from sim.trace import Trace, TraceRequest
from tests.unit.sim.worlds import hardware

H100 = load_hardware("h100", model="llama-8b")
SMALL = Shape(num_requests=60, rate=10.0, turn_tokens=1500.0, output_tokens=40.0)


def simulate(policy: str = "relevo", *, trace: Trace | None = None, **facts: Any) -> Run:
    spec = ClusterSpec(**{"num_prefill": 2, "num_decode": 2, "hardware": H100, **facts})
    cluster = SimCluster(spec, policy, seed=5)
    run = cluster.run(trace or make_trace(SMALL, seed=1))
    cluster.check_integrity()
    return run


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_leaves_nothing(policy: str) -> None:
    run = simulate(policy)
    assert all(flight.finished_s is not None for flight in run.flights)
    assert all(0.0 < (flight.first_token_s or 0.0) <= flight.finished_s for flight in run.flights)  # type: ignore[operator]
    report = make_report(run, Objectives())
    assert report.num_requests == 60
    assert report.num_replays == report.num_refusals == 0
    assert 0.0 <= report.hit_rate < 0.7
    if policy != "relevo":
        assert report.local_share == 0.0


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = simulate(), simulate()
    assert [f.first_token_s for f in first.flights] == [f.first_token_s for f in second.flights]


def test_smaller_blocks_tell_the_same_story() -> None:
    coarse, fine = simulate(block_size=512), simulate(block_size=64)
    hits = [make_report(run, Objectives()).hit_rate for run in (coarse, fine)]
    assert hits[0] == pytest.approx(hits[1], abs=0.05)


@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-1"])
@pytest.mark.parametrize("policy", ["relevo", "dynamo-cost"])
def test_a_killed_worker_costs_no_request(worker_id: str, policy: str) -> None:
    run = simulate(
        policy,
        trace=make_trace(SMALL, seed=1).at_rate(40.0),
        kills=[Kill(worker_id=worker_id, at_s=1.0)],
        hardware=replace(H100, restart_s=1.0),
        num_routers=2,
    )
    assert all(flight.finished_s is not None for flight in run.flights)
    assert make_report(run, Objectives()).num_replays > 0
    successor = run.workers[-1]
    assert successor.key == (worker_id, 2)
    assert successor.engine.busy_s > 0.0, "nobody was sent to the new process"


def test_the_last_prefill_worker_may_die() -> None:
    run = simulate(
        num_prefill=1,
        num_decode=1,
        local_prefill="fallback",
        kills=[Kill(worker_id="prefill-0", at_s=3.0)],
        hardware=replace(H100, restart_s=1000.0),
    )
    assert all(flight.finished_s is not None for flight in run.flights)
    assert make_report(run, Objectives()).local_share > 0.3


def test_while_nobody_can_take_it_a_request_waits_in_line() -> None:
    run = simulate(
        num_prefill=1,
        num_decode=1,
        local_prefill="never",
        kills=[Kill(worker_id="decode-0", at_s=2.0)],
        hardware=replace(H100, restart_s=3.0),
    )
    assert all(flight.finished_s is not None for flight in run.flights)
    assert max(flight.waited_s for flight in run.flights) > 2.0


def burst(num_requests: int, num_tokens: int) -> Trace:
    """All at once, one long common prefix, a block of their own."""
    shared = tuple(range(num_tokens // 512 - 1))
    requests = [
        TraceRequest(
            arrived_s=1.0,  # when every router knows every worker
            num_prompt_tokens=num_tokens,
            num_output_tokens=50,
            block_ids=(*shared, 10_000 + number),
        )
        for number in range(num_requests)
    ]
    return Trace(name="burst", requests=requests)


def test_several_routers_spread_a_burst_of_one_prefix() -> None:
    run = simulate(
        num_prefill=4,
        num_decode=4,
        num_routers=4,
        local_prefill="never",
        trace=burst(128, 4096),
    )
    for ids in ([f.prefill_id for f in run.flights], [f.decode_id for f in run.flights]):
        loads = [ids.count(worker_id) for worker_id in set(ids)]
        assert len(loads) == 4
        assert max(loads) <= 1.3 * 32, loads


def test_workers_refuse_what_is_too_much_and_nothing_is_lost() -> None:
    """Routers that know nothing of each other send more than a worker admits."""
    tiny = hardware(max_num_seqs=1, rpc_latency_s=0.01, token_s=1e-4, num_kv_tokens=50_000)
    run = simulate("round-robin", num_routers=4, hardware=tiny, trace=burst(40, 512))
    assert all(flight.finished_s is not None for flight in run.flights)
    assert make_report(run, Objectives()).num_refusals > 0


def test_a_block_of_a_trace_becomes_several_of_a_worker() -> None:
    trace = burst(2, 2048)
    first, second = (BlockNamer(trace, 128).names(number) for number in (0, 1))
    assert len(first) == 16
    namer = BlockNamer(trace, 128)
    first, second = namer.names(0), namer.names(1)
    assert first[:12] == second[:12]
    assert not set(first[12:]) & set(second[12:])
    with pytest.raises(ValueError, match="divisor"):
        BlockNamer(trace, 100)


@pytest.mark.parametrize(
    "facts",
    [
        {"num_decode": 0},
        {"num_prefill": 0, "local_prefill": "never"},
        {"kills": [Kill(worker_id="decode-9", at_s=1.0)]},
        {"kills": [Kill(worker_id="decode-0", at_s=float("nan"))]},
        {"kills": [Kill(worker_id="decode-0", at_s=-1.0)]},
    ],
)
def test_a_cluster_that_cannot_be_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Got"):
        ClusterSpec(**{"num_prefill": 1, "num_decode": 1, "hardware": H100, **facts})


def lengths(*numbers: int) -> Trace:
    requests = [
        TraceRequest(arrived_s=float(n), num_prompt_tokens=each, num_output_tokens=10, block_ids=())
        for n, each in enumerate(numbers)
    ]
    return Trace(name="lengths", requests=requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_no_worker_can_hold_is_refused_and_holds_nobody_up(policy: str) -> None:
    small = hardware(max_model_len=600, num_kv_tokens=1200, max_num_seqs=2)
    run = simulate(policy, trace=lengths(591, 590, 591, 20), hardware=small)
    assert [flight.finished_s is None for flight in run.flights] == [True, False, True, False]
    assert "601 tokens are more than the 600" in run.flights[0].error
    report = make_report(run, Objectives(ttft_s=1e9, tpot_s=1e9))
    assert (report.num_requests, report.num_too_long, report.good_share) == (4, 2, 0.5)
    with pytest.raises(ValueError, match=r"no request of lengths fits: 601 tokens"):
        simulate(policy, trace=lengths(591, 591), hardware=small)


def test_a_request_that_nobody_ever_takes_ends_the_run() -> None:
    gone = replace(H100, restart_s=1e9)
    with pytest.raises(ValueError, match="1 requests wait, and no worker took one for 600"):
        simulate(
            trace=lengths(90, 90),
            num_decode=1,
            kills=[Kill(worker_id="decode-0", at_s=0.5)],
            hardware=gone,
        )


def test_no_other_policy_does_better_on_made_up_requests() -> None:
    """At a load at which the prompts alone need most of what the prefill workers can compute."""
    trace = make_trace(Shape(num_requests=400), seed=1).at_rate(10.0)
    shares = {}
    for policy in POLICIES:
        run = simulate(policy, trace=trace, num_prefill=4, num_decode=4)
        shares[policy] = make_report(run, Objectives()).good_share
    assert max(POLICIES, key=lambda policy: shares[policy]) == "relevo", shares
