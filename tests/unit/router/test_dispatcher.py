import asyncio
import random
from typing import Any

import pytest
from relevo.v1 import common_pb2

from router.chooser import Chooser
from router.config import RouterConfig
from router.dispatcher import Dispatcher, Route
from router.errors import NeverFits, NoWorkers, QueueFull, RequestTimeout
from router.pools import Pools
from router.prompt import Prompt
from router.report import RequestReport
from router.request import EVERYBODY, RoutedRequest
from router.waiting_queue import Place
from router.worker_view import WorkerKey, WorkerView
from tests.fakes import FakeClock
from tests.unit.router.views import FakeFleet, decode, prefill

REQUEST = RoutedRequest(
    request_id="r", token_ids=[1], sampling=common_pb2.SamplingParams(max_tokens=40)
)


class FakeStates:
    """Any worker's state; the dispatcher only hands it on."""

    def __getitem__(self, key: WorkerKey) -> WorkerKey:
        return key


class FakeWorkers:
    """Views that tests set."""

    def __init__(self, *views: WorkerView) -> None:
        self.fleet = FakeFleet(*views)
        self.fleet.states = FakeStates()  # type: ignore[attr-defined]


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
    place = Place(tenant=EVERYBODY, priority=1, num_tokens=len(asked), is_admitted=is_admitted)
    return await subject.choose(asked, place=place, excluded=frozenset(), timeout_s=timeout_s)


async def test_a_choice_is_counted_and_named() -> None:
    workers = FakeWorkers(prefill(), decode())
    route = await choose(dispatcher(workers), prompt())
    assert 0 < route.transfer_id < 2**63
    assert (route.prefill, route.decode) == (prefill().key, decode().key)
    assert {key: len(picks) for key, picks in workers.fleet.picks.items()} == {
        prefill().key: 1,
        decode().key: 1,
    }


async def test_before_the_first_readiness_it_refuses_and_later_it_waits() -> None:
    workers = FakeWorkers()
    subject = dispatcher(workers)
    with pytest.raises(NoWorkers):
        await choose(subject, prompt())
    workers.fleet.current = [prefill(), decode()]
    subject.workers_changed()
    workers.fleet.current = []
    waiting = asyncio.create_task(choose(subject, prompt()))
    await asyncio.sleep(0.01)
    assert subject.num_waiting == 1
    workers.fleet.current = [prefill(), decode()]
    subject.workers_changed()
    assert (await waiting).decode == decode().key


async def test_who_stood_behind_others_has_waited() -> None:
    clock = FakeClock()
    workers = FakeWorkers(prefill(), decode(has_refused=True))
    subject = dispatcher(workers, clock)
    waiting = [asyncio.create_task(choose(subject, prompt())) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert subject.num_waiting == 2
    clock.advance(3.0)
    workers.fleet.current = [prefill(), decode()]
    subject.workers_changed(is_membership=False)
    assert [route.waited_s for route in await asyncio.gather(*waiting)] == [3.0, 3.0]
    assert (await choose(subject, prompt())).waited_s == 0.0


async def test_reports_that_open_nothing_cost_the_head_no_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decisions = []
    pick = Chooser.pick
    monkeypatch.setattr(Chooser, "pick", lambda *given: decisions.append(given) or pick(*given))
    full = decode(num_running=8)
    workers = FakeWorkers(prefill(), full)
    workers.fleet.kept = Pools([prefill(), full])
    subject = dispatcher(workers)
    waiting = asyncio.create_task(choose(subject, prompt()))
    for num_running in (9, 8, 12, 8):
        workers.fleet.kept.set(decode(num_running=num_running))
        subject.workers_changed(is_membership=False)
        await asyncio.sleep(0.001)
    assert len(decisions) == 1
    workers.fleet.kept.set(decode(num_running=7))
    subject.workers_changed(is_membership=False)
    assert (await waiting).decode == full.key
    assert len(decisions) == 2


async def test_the_end_of_a_wait_says_what_was_missing() -> None:
    workers = FakeWorkers(prefill(), decode(has_refused=True))
    subject = dispatcher(workers)
    with pytest.raises(RequestTimeout):
        await choose(subject, prompt(), timeout_s=0.01)
    workers.fleet.current = []
    with pytest.raises(NoWorkers):
        await choose(subject, prompt(), timeout_s=0.01)


async def test_a_hopeless_deadline_is_refused_before_it_costs_anything() -> None:
    workers = FakeWorkers(prefill(num_waiting_uncached_tokens=60_000), decode())
    subject = dispatcher(workers)
    with pytest.raises(QueueFull):
        await choose(subject, prompt(), timeout_s=5.0)
    assert not workers.fleet.picks
    # What was admitted once is never refused.
    await choose(subject, prompt(), timeout_s=5.0, is_admitted=True)


@pytest.mark.parametrize(("mode", "fits"), [("never", False), ("auto", True), ("fallback", True)])
async def test_a_prompt_must_fit_the_pools_it_needs(mode: str, fits: bool) -> None:
    small = prefill(num_kv_blocks=2)
    subject = dispatcher(FakeWorkers(small, decode()), local_prefill=mode)
    if fits:
        assert (await choose(subject, prompt())).prefill is None
    else:
        with pytest.raises(NeverFits, match=rf"^{len(prompt())} tokens .* the \d+ that"):
            await choose(subject, prompt())


async def test_the_retry_hint_follows_the_queue_and_what_requests_take() -> None:
    subject = dispatcher(FakeWorkers(prefill(), decode(max_num_seqs=1)))
    assert subject.retry_after_s() == 1.0
    for _ in range(100):
        subject.learn(
            REQUEST,
            RequestReport(
                request_id="r",
                num_prompt_tokens=1,
                num_completion_tokens=40,
                first_token_s=0.1,
                elapsed_s=20.0,
            ),
        )
    assert subject.retry_after_s() == pytest.approx(20.0, rel=0.01)
    assert subject.expected_tokens(1000) == 40
    assert subject.expected_tokens(5) == 5


def test_the_bound_of_the_queue_is_configured_or_follows_the_workers() -> None:
    workers = FakeWorkers(prefill(), decode())
    assert dispatcher(workers).max_waiting() == 32
    assert dispatcher(workers, max_waiting_requests=0).max_waiting() == 0


def test_what_could_be_held_at_once_does_not_shrink_with_lost_workers() -> None:
    workers = FakeWorkers(prefill(), decode(0, max_num_seqs=3), decode(1, max_num_seqs=8))
    subject = dispatcher(workers, max_waiting_requests=5)
    assert subject.max_requests(1) == 2 * 3 + 2 * 8 + 5
    # A worker is full from two batches on: it may be given one that reaches beyond.
    assert subject.max_requests(4) == 2 + 4 + 5
    workers.fleet.current.pop()
    subject.workers_changed()
    assert subject.max_requests(4) == 2 + 4 + 5


def test_as_many_of_a_kind_as_could_run_and_wait_leave_no_room_for_one_more() -> None:
    workers = FakeWorkers()
    subject = dispatcher(workers, max_waiting_requests=5)
    assert subject.has_room(EVERYBODY, 1, num_unfinished=1000)  # not ready: refused for that
    workers.fleet.current = [prefill(), decode(max_num_seqs=3)]
    subject.workers_changed()
    assert subject.has_room(EVERYBODY, 1, num_unfinished=2 * 3 + 5 - 1)
    assert not subject.has_room(EVERYBODY, 1, num_unfinished=2 * 3 + 5)
