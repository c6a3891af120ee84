"""Random faults, one after the other, each of a kind that leaves a spare worker."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.clients import CancelStorm, CutClients
from tests.chaos.cluster import Footprint
from tests.chaos.events import (
    Flow,
    Freeze,
    Kill,
    Mend,
    Partition,
    Strike,
    Thaw,
    Wait,
    Whole,
    fault,
)
from tests.chaos.scenario import Event, Stage

NOISE = Strike(
    fault("control_message", "drop", count=2),
    fault("control_message", "duplicate", after=10, count=5),
    fault("control_message", "delay", after=20, count=5, delay_s=0.3),
    fault("kv_send", "corrupt", count=1),
    fault("kv_recv", "raise", after=5, count=1),
)
BLOWS: tuple[Sequence[Event], ...] = (
    (Kill("decode"),),
    (Kill("prefill"),),
    (Freeze("decode"), Wait(4.0), Thaw()),
    (Freeze("prefill"), Wait(4.0), Thaw()),
    (Partition("decode"), Wait(4.0), Mend()),
    (Partition("prefill"), Wait(4.0), Mend()),
    (NOISE, Wait(2.0)),
    (CancelStorm(20),),
    (CutClients(2),),
)
SAMPLE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class RandomFaults:
    """Blow after blow for so long; the next one only when the cluster is whole again."""

    duration_s: float

    async def happen(self, stage: Stage) -> None:
        end_s = time.monotonic() + self.duration_s
        while time.monotonic() < end_s:
            await Flow(60).happen(stage)
            for event in stage.rng.choice(BLOWS):
                await event.happen(stage)
            await Whole().happen(stage)
            await asyncio.sleep(stage.rng.uniform(0.5, 2.0))


@dataclass(frozen=True, slots=True)
class StrikeUntilAsked:
    """The same blow again and again, until the load has asked all it has to ask."""

    blow: Sequence[Event]

    async def happen(self, stage: Stage) -> None:
        assert stage.asking is not None
        while not stage.asking.done():
            await _until_busy(stage)
            for event in self.blow:
                if not stage.asking.done():
                    await event.happen(stage)
            await Whole().happen(stage)


async def _until_busy(stage: Stage) -> None:
    """Wait until several streams run on some decode worker, or none will run any more."""
    assert stage.asking is not None
    while not stage.asking.done():
        if max(worker["running"] for worker in await stage.cluster.workers("decode")) >= 3:
            return
        await asyncio.sleep(0.05)


@dataclass(slots=True)
class FootprintLog:
    """What the ingress has of the machine, over time."""

    samples: list[tuple[float, Footprint]] = field(default_factory=list)

    async def follow(self, pid: int) -> None:
        """Until it is cancelled."""
        while True:
            footprint = Footprint.of(pid)
            assert footprint is not None, "the ingress has ended"
            self.samples.append((time.monotonic(), footprint))
            await asyncio.sleep(SAMPLE_EVERY_S)

    def settled(self) -> list[tuple[float, Footprint]]:
        """Without the first third, in which caches fill."""
        return self.samples[len(self.samples) // 3 :]
