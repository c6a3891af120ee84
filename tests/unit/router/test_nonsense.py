"""A worker that reports what cannot be: it costs nobody else anything, and draws nobody to it."""

import random
from math import inf, nan

import numpy as np
import pytest
from relevo.v1 import state_pb2

from bench.router import make_fleet
from router.fleet import Fleet
from router.joint_scorer import JointCostScorer
from router.policy import CheapestPicker, FilteredPolicy, RouteRequest, ScoredChoices
from router.worker_state import ResyncNeededError
from router.worker_view import WorkerKey

SECONDS = ("prefill_tokens_per_s", "step_s", "request_s", "kv_token_s", "rates_age_s")
COUNTS = (
    "num_running",
    "num_waiting",
    "num_transferring",
    "num_promised_tokens",
    "num_waiting_uncached_tokens",
)
REQUEST = RouteRequest(num_tokens=4000, num_output_tokens=100)
LIAR = WorkerKey("decode-1", 1)


def tell(fleet: Fleet, key: WorkerKey, load: state_pb2.WorkerLoad) -> None:
    state = fleet.states[key]
    message = state_pb2.WatchStateResponse(sequence=state._next_sequence, load=load)
    state.apply(message, now_s=1.0)


def totals(fleet: Fleet) -> np.ndarray:
    seen: list[ScoredChoices] = []

    def scorer(*asked: object) -> ScoredChoices:
        seen.append(JointCostScorer()(*asked))  # type: ignore[arg-type]
        return seen[-1]

    policy = FilteredPolicy(
        local_prefill="auto", scorer=scorer, picker=CheapestPicker(random.Random(1))
    )
    decision = policy.pick(REQUEST, fleet.pools())
    assert decision is not None
    assert np.isfinite(list(decision.chosen.cost)).all()
    return seen[0].totals_s


def lie(key: WorkerKey, fleet: Fleet, name: str, value: float) -> None:
    load = state_pb2.WorkerLoad()
    known = fleet.states[key].load
    assert known is not None
    load.CopyFrom(known)
    if name in ("bandwidth_bytes_per_s", "latency_s", "queued_bytes"):
        for link in load.links:
            setattr(link, name, value)
    elif name in ("free", "used"):
        setattr(load.blocks, name, value)
    else:
        setattr(load, name, value)
    tell(fleet, key, load)


def check(fleet: Fleet, key: WorkerKey) -> None:
    before = totals(make_fleet(8, random.Random(1)))
    after = totals(fleet)
    assert not np.isnan(after).any()
    others = np.isfinite(before) & (before == after)
    # Eight workers, of each pool four, each decode worker with four links and itself.
    assert others.sum() >= 12, "the others' costs moved"
    assert after.min() > 0.0
    assert fleet.pools().tables["decode"].row_of[key] >= 0


@pytest.mark.parametrize("value", [nan, inf, -inf, -1.0, 1e-320, 1e308])
@pytest.mark.parametrize("name", [*SECONDS, "bandwidth_bytes_per_s", "latency_s"])
def test_numbers_that_nothing_measures_count_as_not_measured(name: str, value: float) -> None:
    fleet = make_fleet(8, random.Random(1))
    lie(LIAR, fleet, name, value)
    check(fleet, LIAR)


@pytest.mark.parametrize("name", [*COUNTS, "queued_bytes", "free", "used"])
def test_negative_counts_are_none(name: str) -> None:
    fleet = make_fleet(8, random.Random(1))
    lie(LIAR, fleet, name, -1_000_000)
    check(fleet, LIAR)


def test_digests_of_another_length_end_the_stream_only() -> None:
    fleet = make_fleet(8, random.Random(1))
    events = state_pb2.WatchStateResponse.BlockEvents(stored=[b"short"])
    with pytest.raises(ResyncNeededError):
        fleet.states[LIAR].apply(
            state_pb2.WatchStateResponse(sequence=3, block_events=events), now_s=1.0
        )
    assert (totals(fleet) == totals(make_fleet(8, random.Random(1)))).all()


def test_a_worker_that_clears_its_cache_is_found_with_what_it_stores_next() -> None:
    """It has another place in the index from then on, which its view must know at once."""
    fleet = make_fleet(8, random.Random(1))
    state, digest = fleet.states[LIAR], bytes(32)
    for number, cleared in enumerate((False, True)):
        events = state_pb2.WatchStateResponse.BlockEvents(cleared=cleared, stored=[digest])
        state.apply(
            state_pb2.WatchStateResponse(sequence=3 + number, block_events=events), now_s=1.0
        )
        cached = fleet.indexes["decode"].match(lambda _: [0], now_s=1.0)  # type: ignore[list-item]
        table = fleet.pools().tables["decode"]
        held = dict(zip(table.row_of, cached.confirmed(table.slots).tolist(), strict=True))
        assert {key: tokens for key, tokens in held.items() if tokens} == {LIAR: 32.0}
