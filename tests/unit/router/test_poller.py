"""How often discovery is asked."""

import asyncio
from collections.abc import Sequence

import pytest

from router import poller
from router.poller import DiscoveryPoller, pause_after
from rpc.description import WorkerDescription
from tests.fakes import FakeClock


@pytest.mark.parametrize(
    ("quiet_s", "pause_s"), [(0.0, 0.25), (4.9, 0.25), (5.0, 2.0), (29.9, 2.0), (30.0, 10.0)]
)
def test_the_longer_nothing_changes_the_less_often(quiet_s: float, pause_s: float) -> None:
    assert pause_after(quiet_s) == pause_s


class Asked:
    """A discovery that counts."""

    def __init__(self) -> None:
        self.times = 0

    async def describe(self) -> Sequence[WorkerDescription]:
        self.times += 1
        return []


async def test_news_end_a_settled_pause_and_need_allows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poller, "FAST_POLL_S", 0.001)
    asked, clock, in_need = Asked(), FakeClock(), [True]
    polls = DiscoveryPoller(asked, apply=lambda _: None, is_in_need=lambda: in_need[0], now=clock)
    clock.advance(60.0)
    running = asyncio.create_task(polls.run())

    async def until(times: int) -> None:
        async with asyncio.timeout(5):
            while asked.times < times:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    await until(3)  # there is nobody: it keeps asking
    in_need[0] = False
    await asyncio.sleep(0.02)
    settled = asked.times
    await asyncio.sleep(0.05)
    assert asked.times == settled
    polls.expect_change()
    await asyncio.sleep(0.02)
    assert asked.times == settled
    polls.look_again()
    await until(settled + 3)
    running.cancel()
