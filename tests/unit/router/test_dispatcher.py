import asyncio
import random
from typing import Any

import pytest

from router.config import RouterConfig
from router.dispatcher import Dispatcher, Route
from router.errors import NeverFits, NoWorkers, QueueFull, RequestTimeout
from router.prefix_index import PrefixIndex
from router.prompt import Prompt
from router.report import RequestReport
from router.worker_view import DECODE, PREFILL, Pending, WorkerKey, WorkerView
from tests.fakes import FakeClock
from tests.unit.router.views import decode, prefill


class FakeState:
    def __init__(self) -> None:
        self.picks: list[Pending] = []

    def add_pick(self, pick_id: int, pending: Pending, *, now_s: float) -> None:
        self.picks.append(pending)


class FakeWorkers:
    """Views that tests set."""

    def __init__(self, *views: WorkerView) -> None:
        self.indexes = {PREFILL: PrefixIndex(), DECODE: PrefixIndex()}
        self.current = list(views)
        self.states: dict[WorkerKey, FakeState] = {}
        for view in views:
            self.indexes[view.pool].add_worker(view.key, limit=100)

    def views(self, pool: str) -> list[WorkerView]:
        return [view for view in self.current if view.pool == pool]

    def get(self, key: WorkerKey) -> FakeState:
        return self.states.setdefault(key, FakeState())


def dispatcher(workers: FakeWorkers, clock: FakeClock | None = None, **config: Any) -> Dispatcher:
    result = Dispatcher(
        RouterConfig(**{"local_prefill": "never", **config}),
        workers,  # type: ignore[arg-type]
        rng=random.Random(1),
        now=clock or FakeClock(),
    )
    result.workers_changed()
    return result


def prompt(num_tokens: int = 64) -> Prompt:
    return Prompt(list(range(num_tokens)), cache_salt="", num_output_tokens=10)


async def choose(
    subject: Dispatcher, asked: Prompt, *, timeout_s: float = 5.0, is_admitted: bool = False
) -> Route:
    return await subject.choose(
        asked, excluded=frozenset(), timeout_s=timeout_s, is_admitted=is_admitted
    )


async def test_a_choice_is_counted_on_both_workers_and_predicted_in_both_pools() -> None:
    workers = FakeWorkers(prefill(), decode())
    subject = dispatcher(workers)
    route = await choose(subject, prompt())
    assert 0 < route.transfer_id < 2**63
    assert workers.get(prefill().key).picks == [Pending(num_requests=1, num_tokens=64)]
    assert workers.get(decode().key).picks == [Pending(num_requests=1, num_bytes=64_000)]
    assert [workers.indexes[pool].num_entries() for pool in (PREFILL, DECODE)] == [4, 4]
    again = await choose(subject, prompt())
    assert again.num_predicted_tokens == 64
    # Until the worker tells of it, a predicted prefix is still counted as work.
    assert workers.get(prefill().key).picks[-1].num_tokens == 64


async def test_salts_keep_caches_apart() -> None:
    workers = FakeWorkers(prefill(), decode())
    subject = dispatcher(workers)
    await choose(subject, prompt())
    salted = Prompt(list(range(64)), cache_salt="tenant", num_output_tokens=10)
    assert (await choose(subject, salted)).num_predicted_tokens == 0


async def test_pools_may_cut_their_blocks_differently() -> None:
    workers = FakeWorkers(prefill(block_size=32), decode(block_size=8))
    subject = dispatcher(workers)
    await choose(subject, prompt())
    assert [workers.indexes[pool].num_entries() for pool in (PREFILL, DECODE)] == [2, 8]


async def test_before_the_first_readiness_it_refuses_and_later_it_waits() -> None:
    workers = FakeWorkers()
    subject = dispatcher(workers)
    with pytest.raises(NoWorkers):
        await choose(subject, prompt())
    workers.current = [prefill(), decode()]
    subject.workers_changed()
    workers.current = []
    waiting = asyncio.create_task(choose(subject, prompt()))
    await asyncio.sleep(0.01)
    assert subject.num_waiting == 1
    workers.current = [prefill(), decode()]
    subject.workers_changed()
    assert (await waiting).decode is workers.get(decode().key)


async def test_the_end_of_a_wait_says_what_was_missing() -> None:
    workers = FakeWorkers(prefill(), decode(has_refused=True))
    subject = dispatcher(workers)
    with pytest.raises(RequestTimeout):
        await choose(subject, prompt(), timeout_s=0.01)
    workers.current = []
    with pytest.raises(NoWorkers):
        await choose(subject, prompt(), timeout_s=0.01)


async def test_a_hopeless_deadline_is_refused_before_it_costs_anything() -> None:
    workers = FakeWorkers(prefill(num_waiting_uncached_tokens=60_000), decode())
    subject = dispatcher(workers)
    with pytest.raises(QueueFull):
        await choose(subject, prompt(), timeout_s=5.0)
    assert not any(state.picks for state in workers.states.values())
    # What was admitted once is never refused.
    await choose(subject, prompt(), timeout_s=5.0, is_admitted=True)


@pytest.mark.parametrize(("mode", "fits"), [("never", False), ("auto", True), ("fallback", True)])
async def test_a_prompt_must_fit_the_pools_it_needs(mode: str, fits: bool) -> None:
    small = prefill(num_kv_blocks=2)
    subject = dispatcher(FakeWorkers(small, decode()), local_prefill=mode)
    if fits:
        assert (await choose(subject, prompt())).prefill is None
    else:
        with pytest.raises(NeverFits):
            await choose(subject, prompt())


async def test_the_retry_hint_follows_the_queue_and_what_requests_take() -> None:
    subject = dispatcher(FakeWorkers(prefill(), decode(max_num_seqs=1)))
    assert subject.retry_after_s() == 1.0
    for _ in range(100):
        subject.learn(
            RequestReport(
                request_id="r",
                num_prompt_tokens=1,
                num_completion_tokens=40,
                first_token_s=0.1,
                elapsed_s=20.0,
            )
        )
    assert subject.retry_after_s() == pytest.approx(20.0, rel=0.01)
    assert subject.expected_tokens(1000) == 40
    assert subject.expected_tokens(5) == 5


def test_the_bound_of_the_queue_is_configured_or_follows_the_workers() -> None:
    workers = FakeWorkers(prefill(), decode())
    assert dispatcher(workers).max_waiting() == 32
    assert dispatcher(workers, max_waiting_requests=0).max_waiting() == 0
