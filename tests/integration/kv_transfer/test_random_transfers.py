"""Thousands of hand-overs under a seeded fault plan: the pools stay intact, the outputs equal.

`RELEVO_SOAK_MINUTES` makes it 10,000 transfers for each backend, with kills and freezes;
`RELEVO_SOAK_SEED` another run.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import pytest

from faults.plan import Fault, FaultPlan
from kv_transfer.control import ControlClosedError, FetchOrder, FetchReply, TransferFailedError
from tests.integration.kv_transfer.conftest import SHORT_LEASE_S, SHORT_TIMEOUT_S, Decode, Prefill
from tests.integration.kv_transfer.wire import TcpTransferControl
from tests.long_form import IS_LONG

SEED = int(os.environ.get("RELEVO_SOAK_SEED", "1"))
# The short form takes a minute over both backends, and is long enough for each of its faults.
NUM_TRANSFERS = 10_000 if IS_LONG else 300
SHORTEST_S = 0.0 if IS_LONG else 30.0
LONGEST_S = 3600.0 if IS_LONG else 90.0
NUM_AT_ONCE = 4
# of one transfer; then it has found its end on both sides
GRACE_S = 2 * SHORT_TIMEOUT_S + SHORT_LEASE_S


def fault_plan(rng: random.Random, point: str) -> list[dict]:
    """Every action an operation may suffer and survive, spread over the whole run."""
    actions = ["corrupt", "raise", "delay", "delay", "corrupt", "drop"]
    return [
        {
            "point": point,
            "action": rng.choice(actions),
            "after": rng.randrange(20 + 30 * number),
            "delay_s": rng.uniform(0.0, 0.1),
        }
        for number in range(400 if IS_LONG else 12)
    ]


class LossyControl(TcpTransferControl):
    """Calls to one prefill process, of which some are lost, doubled or late."""

    def __init__(self, port: int, rng: random.Random) -> None:
        super().__init__(port)
        self.rng = rng

    async def fetch(self, order: FetchOrder) -> FetchReply:
        fate = self.rng.random()
        if fate < 0.02:
            raise ControlClosedError("lost on the way there")
        if fate < 0.04:
            await super().fetch(order)
        if fate < 0.06:
            await super().fetch(order)
            raise ControlClosedError("lost on the way back")
        return await super().fetch(order)

    async def release(self, transfer_id: int, *, epoch: int) -> None:
        if self.rng.random() < 0.98:
            await super().release(transfer_id, epoch=epoch)


class Run:
    """One run over two prefill processes."""

    def __init__(self, decode: Decode, rng: random.Random) -> None:
        self.decode, self.rng = decode, rng
        self.outcomes: Counter[str] = Counter()
        self.began_at = time.monotonic()
        self.num_started = 0

    @property
    def is_over(self) -> bool:
        elapsed_s = time.monotonic() - self.began_at
        are_all_done = self.num_started - self.outcomes["no link"] >= NUM_TRANSFERS
        return elapsed_s >= LONGEST_S or (are_all_done and elapsed_s >= SHORTEST_S)

    async def one_after_another(self) -> None:
        while not self.is_over:
            self.num_started += 1
            self.outcomes[await self.transfer()] += 1

    async def transfer(self) -> str:
        rng = self.rng
        worker_id = rng.choice(sorted(self.decode.prefills))
        if self.decode.dialer.link_for(worker_id) is None:
            await asyncio.sleep(0.05)
            return "no link"
        moving = asyncio.create_task(
            self.decode.hand_over(
                worker_id,
                num_tokens=rng.randint(1, 150),
                chunk=rng.choice([8, 16, 150]),
                delay_s=rng.choice([0.0, 0.0, 0.002]),
                num_cached=8 * rng.choice([0, 0, 0, 2]) if rng.random() < 0.5 else 0,
            )
        )
        if rng.random() < 0.05:
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            moving.cancel()
        try:
            await asyncio.wait_for(moving, GRACE_S + 10)
        except TransferFailedError as error:
            return str(error.reason)
        except ControlClosedError:
            return "no worker"
        except asyncio.CancelledError:
            return "cancelled"
        return "arrived"

    async def break_things(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(3.0, 8.0))
            prefill = self.decode.prefills[self.rng.choice(sorted(self.decode.prefills))]
            if self.rng.random() < 0.5:
                prefill.signal(signal.SIGSTOP)
                await asyncio.sleep(self.rng.uniform(0.1, 2 * SHORT_TIMEOUT_S))
                prefill.signal(signal.SIGCONT)
            else:
                await replace(prefill)
                self.decode.announce()


async def replace(prefill: Prefill) -> None:
    prefill.signal(signal.SIGKILL)
    await prefill.stop()
    await prefill.start()


async def all_given_back(prefill: Prefill) -> None:
    for _ in range(round(GRACE_S / 0.1) + 50):
        report = await prefill.report()
        if report["num_open"] == 0:
            break
        await asyncio.sleep(0.1)
    given_back = Counter(report["given_back"])
    assert report["num_open"] == 0
    assert set(given_back.values()) <= {1}, "blocks were given back twice"


@pytest.mark.soak
@pytest.mark.timeout(0 if IS_LONG else 240)
async def test_random_transfers_leave_the_pools_intact(
    hasty_decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = hasty_decode
    rng = random.Random(SEED)
    monkeypatch.setattr(Prefill, "control", property(lambda self: LossyControl(self.port, rng)))
    faults = [Fault(match={}, **fault) for fault in fault_plan(rng, "kv_recv")]
    plan = FaultPlan(faults, None)
    monkeypatch.setattr("faults.plan._PLAN", plan)
    await decode.start(8, 12, faults=fault_plan(rng, "kv_send"), lease_s=SHORT_LEASE_S)
    run = Run(decode, rng)
    breaking = asyncio.create_task(run.break_things()) if IS_LONG else None
    await asyncio.gather(*(run.one_after_another() for _ in range(NUM_AT_ONCE)))
    if breaking is not None:
        breaking.cancel()
        with suppress(asyncio.CancelledError):
            await breaking
    for prefill in decode.prefills.values():
        with suppress(ProcessLookupError):
            prefill.signal(signal.SIGCONT)
    print(f"{decode.config.backend}: {dict(run.outcomes)}, {decode.receiver.counters}")  # noqa: T201
    monkeypatch.setattr("faults.plan._PLAN", FaultPlan([], None))
    assert min(plan._hits.values()) > max(fault.after for fault in faults), "faults were left over"
    assert run.outcomes["arrived"] > (run.num_started - run.outcomes["no link"]) / 2
    await decode.link_up(timeout_s=30.0)
    await asyncio.gather(*(all_given_back(each) for each in decode.prefills.values()))
    assert decode.quarantined == []
    assert sorted(decode.free_blocks) == list(range(len(decode.pool)))
    assert decode.receiver.num_active == 0
