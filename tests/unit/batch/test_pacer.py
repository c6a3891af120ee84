"""How many requests run at once."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batch.pacer import FIRST_LIMIT, LONGEST_PAUSE_S, Pacer


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_limit_grows_by_one_with_each_round_of_answers() -> None:
    pacer = Pacer(64)
    for _ in range(FIRST_LIMIT + 1):
        pacer.answered()
    assert int(pacer.limit) == FIRST_LIMIT + 1


def test_a_burst_of_refusals_halves_it_once() -> None:
    clock = Clock()
    pacer = Pacer(64, now=clock)
    pacer.limit = 32.0
    for _ in range(10):
        pacer.refused(clock.now_s - 1.0, 2.0)
    assert pacer.limit == 16.0
    assert pacer.wait_s() == 2.0
    clock.now_s += 2.0
    assert pacer.wait_s() == 0.0
    pacer.refused(clock.now_s, 1.0)
    assert pacer.limit == 8.0


def test_without_a_hint_the_pause_doubles_until_something_is_answered() -> None:
    clock = Clock()
    pacer = Pacer(4, now=clock)
    pauses = []
    for _ in range(10):
        pacer.refused(clock.now_s, None)
        pauses.append(pacer.wait_s())
        clock.now_s += pauses[-1] or 0.0
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    pacer.answered()
    pacer.refused(clock.now_s, None)
    assert pacer.wait_s() == 0.5


@given(hint_s=st.floats(min_value=0, max_value=1e9))
def test_no_hint_keeps_it_from_asking_for_longer_than_a_minute(hint_s: float) -> None:
    clock = Clock()
    pacer = Pacer(4, now=clock)
    pacer.refused(clock.now_s, hint_s)
    wait_s = pacer.wait_s()
    assert wait_s is not None
    assert wait_s <= LONGEST_PAUSE_S + 1e-6


async def test_places_are_given_up_to_the_limit_and_refused_ones_go_first() -> None:
    pacer = Pacer(1)
    order: list[str] = []

    async def take(name: str, *, is_again: bool) -> None:
        async with pacer.place(is_again=is_again):
            assert pacer.num_running == 1
            order.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group, pacer.place():
        group.create_task(take("new", is_again=False))
        await asyncio.sleep(0)
        group.create_task(take("refused", is_again=True))
        await asyncio.sleep(0)
        assert order == []
    assert order == ["refused", "new"]


async def test_who_is_cancelled_while_waiting_leaves_nothing_behind() -> None:
    pacer = Pacer(1)
    async with pacer.place():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), pacer.place(is_again=True):
                pass
    assert pacer.wait_s() == 0.0
    pacer.check_integrity()


class Paces(RuleBasedStateMachine):
    """Random answers and refusals at random times."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pacer = Pacer(16, now=self.clock)
        self.sent_s: list[float] = []

    @precondition(lambda self: self.pacer.wait_s() == 0.0)
    @rule()
    def send(self) -> None:
        self.sent_s.append(self.clock.now_s)
        self.pacer.num_running += 1

    @precondition(lambda self: self.sent_s)
    @rule(is_refused=st.booleans(), hint_s=st.none() | st.floats(0, 100))
    def end(self, is_refused: bool, hint_s: float | None) -> None:
        sent_s = self.sent_s.pop(0)
        self.pacer.num_running -= 1
        if is_refused:
            self.pacer.refused(sent_s, hint_s)
        else:
            self.pacer.answered()

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def a_request_may_leave_within_a_minute_or_when_one_ends(self) -> None:
        self.pacer.check_integrity()
        wait_s = self.pacer.wait_s()
        if wait_s is None:
            assert self.sent_s
        else:
            assert 0.0 <= wait_s <= LONGEST_PAUSE_S + 1e-6


TestPaces = Paces.TestCase
TestPaces.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
