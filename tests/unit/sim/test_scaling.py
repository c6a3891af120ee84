"""Pools that grow and shrink on paper: nothing is lost, and idle workers are not paid for."""

from dataclasses import replace

import pytest

from router.scaling.config import DecodeScaling, PrefillScaling, ScalingConfig
from router.worker_view import DECODE, PREFILL
from rpc.feed_pace import FeedPace
from sim.cluster import ClusterSpec, SimCluster
from sim.report import Objectives
from sim.scaling import OngoingRequests, PoolKeeper, TokenSignals
from sim.scaling_experiment import cheapest_equal, run_fixed, run_scaled
from sim.trace import Trace, TraceRequest
from tests.unit.sim.worlds import hardware

# 1,000 prompt tokens/s and 100 streams' tokens of 10 ms: one worker of each serves 1 request/s.
SLOW = hardware(max_num_seqs=4, max_model_len=5000, restart_s=3.0)
PACE = FeedPace(min_interval_s=0.5)
SPEC = ClusterSpec(num_prefill=4, num_decode=4, hardware=SLOW, block_size=100, pace=PACE)
DELAYS = {"up_delay_s": 2.0, "down_delay_s": 10.0}
CONFIG = ScalingConfig(
    prefill=PrefillScaling(min=1, max=4, ttft_s=2.0, **DELAYS),
    decode=DecodeScaling(min=1, max=4, itl_s=0.05, **DELAYS),
)
OBJECTIVES = Objectives(ttft_s=4.0, tpot_s=0.05)


def step_trace() -> Trace:
    """A request every 3 s, then for a minute three a second, then one every 3 s again."""
    times = [3.0 * n for n in range(10)]
    times += [30.0 + n / 3 for n in range(180)]
    times += [90.0 + 3.0 * n for n in range(20)]
    requests = [
        TraceRequest(arrived_s=at_s, num_prompt_tokens=500, num_output_tokens=100, block_ids=())
        for at_s in times
    ]
    return Trace(name="step", requests=requests, block_tokens=100)


def test_a_load_step_grows_both_pools_and_both_return() -> None:
    start = replace(SPEC, num_prefill=1, num_decode=1)
    cluster = SimCluster(start, "relevo", seed=1)
    keeper = PoolKeeper(cluster, TokenSignals(config=CONFIG).make(cluster), start_s=3.0)
    run = cluster.run(step_trace())
    cluster.check_integrity()
    assert all(flight.finished_s is not None for flight in run.flights)
    assert not any(flight.num_attempts - flight.num_refusals > 1 for flight in run.flights)
    assert keeper.most[PREFILL] >= 2
    assert keeper.most[DECODE] >= 2
    assert [len(cluster.serving(pool)) for pool in (PREFILL, DECODE)] == [1, 1]
    grown = [worker for worker in run.workers if "new" in worker.key.worker_id]
    assert all(worker.engine.busy_s > 0.0 for worker in grown), "somebody was started for nothing"
    ended = [worker for worker in run.workers if worker.ended_s is not None]
    assert len(ended) >= 2


def test_idle_workers_are_not_paid_for() -> None:
    trace = step_trace()
    fixed = run_fixed(SPEC, trace, OBJECTIVES, seed=1)
    ours = run_scaled(SPEC, trace, TokenSignals(config=CONFIG), OBJECTIVES, seed=1)
    assert fixed.good_share == 1.0
    assert ours.good_share > 0.8
    assert ours.worker_s < 0.75 * fixed.worker_s
    assert ours.prefill_worker_s + ours.decode_worker_s == ours.worker_s


@pytest.mark.parametrize("target", [0.5, 50.0])
def test_serve_s_policy_goes_by_the_number_of_requests(target: float) -> None:
    policy = OngoingRequests(
        config=CONFIG, target={PREFILL: target, DECODE: target}, look_back_s=5.0
    )
    report = run_scaled(SPEC, step_trace(), policy, OBJECTIVES, seed=1)
    sizes = (report.most_prefill, report.most_decode)
    assert sizes == ((4, 4) if target < 1 else (1, 1))


def test_the_cheapest_of_equal_goodput_is_compared() -> None:
    fixed = run_fixed(SPEC, step_trace(), OBJECTIVES, seed=1)
    rivals = [
        replace(fixed, policy=name, good_share=share, prefill_worker_s=cost, decode_worker_s=0.0)
        for name, share, cost in (("dear", 0.95, 900.0), ("cheap", 0.899, 500.0), ("bad", 0.5, 1.0))
    ]
    ours = replace(fixed, good_share=0.9)
    assert cheapest_equal(rivals, ours).policy == "cheap"
    assert cheapest_equal(rivals[2:], ours).policy == "bad"
