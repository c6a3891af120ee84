import random
from collections import Counter
from dataclasses import replace

import pytest

from router.chooser import Chooser, Pick
from router.joint_scorer import JointCostScorer
from router.policy import CheapestPicker, FilteredPolicy
from router.prompt import Prompt
from router.worker_view import DECODE, PREFILL, Pending, WorkerKey
from tests.fakes import FakeClock
from tests.unit.router.views import FakeFleet, decode, prefill


def chooser(fleet: FakeFleet, clock: FakeClock | None = None, seed: int = 1) -> Chooser:
    rng = random.Random(seed)
    policy = FilteredPolicy(
        local_prefill="never", scorer=JointCostScorer(), picker=CheapestPicker(rng)
    )
    return Chooser(fleet, policy, rng=rng, now=clock or FakeClock())


def prompt(num_tokens: int = 64, salt: str = "", session_key: str = "", **more: bool) -> Prompt:
    return Prompt(
        list(range(num_tokens)),
        cache_salt=salt,
        num_output_tokens=10,
        session_key=session_key,
        **more,
    )


def take(subject: Chooser, asked: Prompt) -> Pick:
    pick = subject.pick(asked)
    assert pick is not None
    subject.take(asked, pick)
    return pick


def test_a_choice_is_counted_on_both_workers_and_predicted_in_both_pools() -> None:
    fleet = FakeFleet(prefill(), decode())
    subject = chooser(fleet)
    take(subject, prompt())
    assert fleet.picks[prefill().key] == [Pending(num_requests=1, num_tokens=64)]
    assert fleet.picks[decode().key] == [
        Pending(num_requests=1, num_bytes=64_000, num_kv_tokens=64)
    ]
    assert [fleet.indexes[pool].num_predictions for pool in (PREFILL, DECODE)] == [4, 4]
    assert take(subject, prompt()).num_predicted_tokens == 64
    # Until the worker tells of it, a predicted prefix is still counted as work.
    assert fleet.picks[prefill().key][-1].num_tokens == 64


def test_what_a_worker_told_is_no_work_and_needs_no_prediction() -> None:
    fleet = FakeFleet(prefill(), decode())
    names = prompt().block_names(prefill().scheme)
    fleet.indexes[PREFILL].store(prefill().key, names[:3])
    take(chooser(fleet), prompt())
    assert fleet.picks[prefill().key] == [Pending(num_requests=1, num_tokens=16)]
    assert fleet.indexes[PREFILL].num_predictions == 1


def test_a_prompt_that_skips_caches_has_all_its_work_before_it() -> None:
    warm, cold = prefill(0, num_waiting_uncached_tokens=8), prefill(1)
    fleet = FakeFleet(warm, cold, decode(peers=2))
    names = prompt().block_names(warm.scheme)
    fleet.indexes[PREFILL].store(warm.key, names)
    fleet.indexes[DECODE].store(decode().key, names)
    assert take(chooser(fleet), prompt()).decision.chosen.choice.prefill == warm
    pick = take(chooser(fleet), prompt(skips_cache=True))
    assert pick.decision.chosen.choice.prefill == cold
    assert pick.num_predicted_tokens == 0
    assert fleet.picks[cold.key] == [Pending(num_requests=1, num_tokens=64)]
    assert fleet.indexes[PREFILL].num_predictions == len(names)  # others will find it there


def test_a_decode_worker_alone_carries_the_computation() -> None:
    fleet = FakeFleet(decode(peers=0))
    rng = random.Random(1)
    policy = FilteredPolicy(
        local_prefill="auto", scorer=JointCostScorer(), picker=CheapestPicker(rng)
    )
    take(Chooser(fleet, policy, rng=rng, now=FakeClock()), prompt())
    assert fleet.picks[decode().key] == [Pending(num_requests=1, num_tokens=64, num_kv_tokens=64)]


def test_picking_alone_changes_nothing() -> None:
    fleet = FakeFleet(prefill(), decode())
    assert chooser(fleet).pick(prompt()) is not None
    assert not fleet.picks
    assert fleet.indexes[PREFILL].num_predictions == 0


def test_salts_keep_caches_apart() -> None:
    fleet = FakeFleet(prefill(), decode())
    subject = chooser(fleet)
    take(subject, prompt())
    assert take(subject, prompt(salt="tenant")).num_predicted_tokens == 0


def test_pools_may_cut_their_blocks_differently() -> None:
    fleet = FakeFleet(prefill(block_size=32), decode(block_size=8))
    take(chooser(fleet), prompt())
    assert [fleet.indexes[pool].num_predictions for pool in (PREFILL, DECODE)] == [2, 8]


def test_a_session_stays_with_its_workers_in_every_router() -> None:
    workers = [prefill(n) for n in range(4)] + [decode(n, peers=4) for n in range(4)]
    picked = Counter(
        tuple(worker.key for worker in pick.decision.chosen.choice.workers)
        for seed in range(8)
        if (pick := chooser(FakeFleet(*workers), seed=seed).pick(prompt(session_key="chat-7")))
    )
    assert len(picked) == 1


def test_sessions_are_spread_and_few_move_when_a_worker_leaves() -> None:
    workers = [decode(n, peers=4) for n in range(8)] + [prefill(n) for n in range(4)]
    sessions = [f"session-{number}" for number in range(200)]

    def homes(fleet: FakeFleet) -> dict[str, WorkerKey]:
        subject = chooser(fleet)
        return {
            name: pick.decision.chosen.choice.decode.key
            for name in sessions
            if (pick := subject.pick(prompt(session_key=name)))
        }

    before, after = homes(FakeFleet(*workers)), homes(FakeFleet(*workers[1:]))
    assert len(Counter(before.values())) == 8
    moved = [name for name in sessions if before[name] != after[name]]
    assert all(before[name] == workers[0].key for name in moved)


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_burst_over_stale_routers_spreads_evenly(is_warm: bool) -> None:
    """Four routers that hear nothing of each other, one shared system prompt, no report yet."""
    feeders = [prefill(n, max_num_seqs=64) for n in range(4)]
    takers = [decode(n, peers=4, max_num_seqs=64) for n in range(4)]
    counts: Counter[WorkerKey] = Counter()
    for seed in range(4):
        fleet = CountingFleet(*feeders, *takers)
        if is_warm:
            names = shared_prompt(0).block_names(feeders[0].scheme)[:60]
            for worker in feeders + takers:
                fleet.indexes[worker.pool].store(worker.key, names)
        subject = chooser(fleet, seed=seed)
        for number in range(32):
            pick = take(subject, shared_prompt(32 * seed + number))
            counts.update(worker.key for worker in pick.decision.chosen.choice.workers)
    for pool in (feeders, takers):
        loads = [counts[worker.key] for worker in pool]
        assert sum(loads) == 128
        assert max(loads) <= 1.3 * 32, loads


def shared_prompt(number: int) -> Prompt:
    """A system prompt of 960 tokens that all share, and 40 of its own."""
    return Prompt([*range(960), *[1000 + number] * 40], cache_salt="", num_output_tokens=10)


class CountingFleet(FakeFleet):
    """Puts picks into the views, as a worker's state does."""

    def add_pick(self, key: WorkerKey, pick_id: int, pending: Pending, *, now_s: float) -> None:
        for place, view in enumerate(self.current):
            if view.key == key:
                before = view.pending
                total = Pending(
                    num_requests=before.num_requests + pending.num_requests,
                    num_tokens=before.num_tokens + pending.num_tokens,
                    num_bytes=before.num_bytes + pending.num_bytes,
                )
                self.current[place] = replace(view, pending=total)
