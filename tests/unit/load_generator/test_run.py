"""Requests leave by the clock, whatever the answers do."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from load_generator.outcome import Ending, Outcome
from load_generator.planned_request import PlannedRequest
from load_generator.run import Run, Sender
from tests.fake_time import in_fake_time


def request(due_s: float = 0.0, **behaviour: object) -> PlannedRequest:
    fields = {"body": b"", "num_prompt_tokens": 1, "num_output_tokens": 1, **behaviour}
    return PlannedRequest(due_s=due_s, **fields)  # type: ignore[arg-type]


class FakeAsker:
    """Takes so long for each answer."""

    def __init__(self, now: Callable[[], float], *, takes_s: float) -> None:
        self.now = now
        self.takes_s = takes_s
        self.num_running = 0
        self.most_running = 0

    async def ask(self, request: PlannedRequest, due_s: float) -> Outcome:
        outcome = Outcome(request=request, due_s=due_s, sent_s=self.now())
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(self.takes_s)
        self.num_running -= 1
        is_left = request.cancel_after_tokens is not None
        outcome.ending = Ending.CANCELLED if is_left else Ending.COMPLETED
        outcome.ended_s = self.now()
        return outcome


async def send(
    plan: Sequence[PlannedRequest], *, takes_s: float, **settings: object
) -> tuple[Run, FakeAsker]:
    now = asyncio.get_running_loop().time
    asker = FakeAsker(now, takes_s=takes_s)
    return await Sender(asker, now=now, **settings).send(plan), asker  # type: ignore[arg-type]


@in_fake_time
async def test_a_slow_server_delays_no_request() -> None:
    run, asker = await send([request(0.01 * n) for n in range(5)], takes_s=0.1)
    for number, outcome in enumerate(sorted(run.outcomes, key=lambda each: each.due_s)):
        assert outcome.due_s == pytest.approx(run.started_s + 0.01 * number)
        assert outcome.sent_s == pytest.approx(outcome.due_s)
    assert asker.most_running == 5
    assert run.duration_s == pytest.approx(0.14)


@in_fake_time
async def test_waiting_for_a_place_counts() -> None:
    run, asker = await send([request()] * 3, takes_s=0.03, max_concurrency=1)
    assert asker.most_running == 1
    assert max(outcome.e2e_s for outcome in run.outcomes) == pytest.approx(0.09)


@in_fake_time
async def test_closed_clients_ask_again_when_they_were_answered() -> None:
    run, asker = await send([request()] * 6, takes_s=0.02, max_concurrency=2, is_closed=True)
    assert len(run.outcomes) == 6
    assert asker.most_running == 2
    # A client's own loop is no queue of the server's: its next request is due when it asks.
    assert max(outcome.e2e_s for outcome in run.outcomes) == pytest.approx(0.02)


@in_fake_time
async def test_who_left_may_ask_again() -> None:
    plan = [request(cancel_after_tokens=1, resends=True), request(cancel_after_tokens=1)]
    run, _ = await send(plan, takes_s=0.0)
    endings = [outcome.ending for outcome in run.outcomes]
    assert sorted(each.value for each in endings) == ["cancelled", "cancelled", "completed"]


@in_fake_time
async def test_something_happens_when_half_of_it_was_sent() -> None:
    seen = []

    async def half_way() -> str:
        seen.append(asyncio.get_running_loop().time())
        return "it happened"

    plan = [request(0.02 * n) for n in range(6)]
    run, _ = await send(plan, takes_s=0.0, half_way=half_way)
    assert run.events == ["it happened"]
    assert seen[0] - run.started_s == pytest.approx(0.04)
