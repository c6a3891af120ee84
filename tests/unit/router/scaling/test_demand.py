"""How many workers a load asks for, signal by signal."""

import pytest

from router.scaling.demand import decode_demand, prefill_demand
from tests.unit.router.scaling.loads import config, load

PREFILL = config().prefill
DECODE = config().decode
assert PREFILL is not None
assert DECODE is not None


def test_nothing_to_do_asks_for_nobody() -> None:
    assert prefill_demand(load(), PREFILL).workers == 0.0
    assert decode_demand(load(), DECODE).workers == 0.0


def test_prompts_that_keep_a_worker_busy_ask_for_two_when_half_the_time_is_meant() -> None:
    demand = prefill_demand(load(prefill={"computed_tokens_per_s": 1000.0}), PREFILL)
    assert demand.workers == pytest.approx(2.0)
    assert "1000 prompt tokens/s keep 1.0 worker(s) busy; 50% of the time is meant" in demand.reason


def test_waiting_prompts_count_against_half_of_the_ttft_objective() -> None:
    # 3,000 tokens are 3 s of one worker; 1 s of the 2 s objective may pass in the line.
    demand = prefill_demand(load(prefill={"waiting_tokens": 2000}, queued_tokens=1000), PREFILL)
    assert demand.workers == pytest.approx(3.0)
    assert "3000 uncached prompt tokens wait, 3.0 s for one worker" in demand.reason


@pytest.mark.parametrize(
    ("decode", "workers", "reason"),
    [
        ({"num_streams": 20}, 4.0, "20 streams for 10 places"),
        ({"kv_tokens": 1500}, 3.0, "1500 tokens of KV"),
        ({"step_s": 0.01, "streams_s": 0.1, "num_streams": 3}, 2.5, "ITL head-room is 40.0 ms"),
    ],
)
def test_decode_asks_by_its_scarcest_good(
    decode: dict[str, float], workers: float, reason: str
) -> None:
    demand = decode_demand(load(decode=decode), DECODE)
    assert demand.workers == pytest.approx(workers)
    assert reason in demand.reason


def test_a_step_that_is_too_slow_alone_asks_for_nobody() -> None:
    slow = load(decode={"step_s": 0.06, "streams_s": 5.0, "num_streams": 1})
    assert decode_demand(slow, DECODE).workers == pytest.approx(0.2)


def test_no_more_workers_than_streams_are_asked_for() -> None:
    noise = load(decode={"step_s": 0.0, "streams_s": 0.323, "num_streams": 1})
    assert decode_demand(noise, DECODE).workers <= 1.0


def test_what_waits_in_the_router_will_need_both_pools() -> None:
    waiting = load(queued_requests=10, queued_tokens=1000)
    assert prefill_demand(waiting, PREFILL).workers == pytest.approx(1.0)
    assert decode_demand(waiting, DECODE).workers == pytest.approx(2.0)
