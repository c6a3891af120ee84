"""Prefill processes over real Gloo, and the decode side in the test's own process."""

import asyncio
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.control import FailureReason, PeerInfo, TransferFailedError, WorkerRef
from kv_transfer.link_dialer import LinkDialer
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.receiver import KVReceiver, ReceiveOrder
from tests.integration.kv_transfer import prefill_process
from tests.integration.kv_transfer.wire import TcpLinkControl, TcpTransferControl
from tests.unit.kv_transfer.fakes import (
    CPU,
    DECODE,
    Reservation,
    eventually,
    make_layout,
    make_pool,
    tokens_of,
)

# Children are forked from a process that has imported torch once.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.integration.kv_transfer.prefill_process"])
# No deadline of these passes while a busy machine pauses; tests of deadlines have the short ones.
CONFIG = {"transfer_timeout_s": 15.0, "lease_s": 20.0, "digest_sample": 1.0}
SHORT_TIMEOUT_S, SHORT_LEASE_S = 2.0, 1.0
NUM_BLOCKS = 128


@dataclass
class Prefill:
    """Handle of one prefill process."""

    worker_id: str
    layout: dict
    seed: int
    config: dict
    process: BaseProcess | None = None
    pipe: Connection | None = None
    port: int = 0
    incarnation: int = 0
    pool: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.pool = make_pool(make_layout(**self.layout), NUM_BLOCKS, seed=self.seed)

    async def start(self, faults: Sequence[dict] = ()) -> None:
        options = {
            "worker_id": self.worker_id,
            "config": self.config,
            "layout": self.layout,
            "num_blocks": NUM_BLOCKS,
            "seed": self.seed,
        }
        self.pipe, far = PROCESSES.Pipe()
        self.process = PROCESSES.Process(
            target=prefill_process.run, args=(options, list(faults), far), daemon=True
        )
        self.process.start()
        far.close()
        hello = await asyncio.to_thread(self.pipe.recv)
        self.port, self.incarnation = hello["port"], hello["incarnation"]

    @property
    def peer(self) -> PeerInfo:
        worker = WorkerRef(self.worker_id, self.incarnation)
        return PeerInfo(worker=worker, address=f"127.0.0.1:{self.port}")

    @property
    def control(self) -> TcpTransferControl:
        return TcpTransferControl(self.port)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def report(self) -> dict:
        return await self.control.call("report")

    async def stop(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.join)
        self.pipe.close()


class Decode:
    """The decode side, and the prefill processes it is linked to."""

    def __init__(self, block_size: int, backend: str, transfer_timeout_s: float) -> None:
        self.settings = {**CONFIG, "backend": backend, "transfer_timeout_s": transfer_timeout_s}
        self.layout = make_layout(block_size)
        self.pool = make_pool(self.layout, NUM_BLOCKS)
        self.config = KVTransferConfig(**self.settings)
        self.prefills: dict[str, Prefill] = {}
        identity = LinkIdentity(worker=DECODE, layout=self.layout, device=CPU)
        self.dialer = LinkDialer(
            identity,
            config=self.config,
            connect=lambda peer: TcpLinkControl(int(peer.address.rsplit(":", 1)[1])),
        )
        self.receiver = KVReceiver(
            self.pool,
            layout=self.layout,
            worker=DECODE,
            config=self.config,
            end_quarantine=self.end_quarantine,
        )
        self.num_transfers = 0
        self.free_blocks = list(range(NUM_BLOCKS))
        # given back while an operation still wrote them
        self.quarantined: list[int] = []

    async def start(
        self,
        *block_sizes: int,
        faults: Sequence[dict] = (),
        faults_of_first: Sequence[dict] = (),
        lease_s: float = CONFIG["lease_s"],
    ) -> None:
        for number, block_size in enumerate(block_sizes):
            config = {**self.settings, "lease_s": lease_s}
            prefill = Prefill(f"prefill-{number}", {"block_size": block_size}, number, config)
            self.prefills[prefill.worker_id] = prefill
        first, *others = self.prefills.values()
        await asyncio.gather(
            first.start([*faults, *faults_of_first]), *(each.start(faults) for each in others)
        )
        await self.link_up()

    async def link_up(self, timeout_s: float = 20.0) -> None:
        self.announce()
        await eventually(self.all_linked, timeout_s)

    def announce(self) -> None:
        self.dialer.set_peers("ingress", [prefill.peer for prefill in self.prefills.values()])

    def all_linked(self) -> bool:
        return all(
            self.dialer.link_for(prefill.worker_id, prefill.incarnation)
            for prefill in self.prefills.values()
        )

    async def hand_over(
        self,
        worker_id: str = "prefill-0",
        *,
        num_tokens: int = 40,
        chunk: int = 16,
        delay_s: float = 0.0,
        num_cached: int = 0,
    ) -> None:
        """Move one request and compare every token."""
        link = self.dialer.link_for(worker_id)
        if link is None:
            raise TransferFailedError(FailureReason.LINK_BROKEN, "no link")
        self.num_transfers += 1
        transfer_id = self.num_transfers
        prefill = self.prefills[worker_id]
        rng = random.Random(transfer_id)
        source = rng.sample(range(NUM_BLOCKS), -(-num_tokens // prefill.pool.shape[3]))
        target: list[int] = []

        async def reserve() -> Reservation:
            rng.shuffle(self.free_blocks)
            num_blocks = self.layout.num_blocks(num_tokens + 1)
            target[:], self.free_blocks = (
                self.free_blocks[:num_blocks],
                self.free_blocks[num_blocks:],
            )
            return Reservation(list(target), num_cached)

        def give_back(in_flight: Sequence[int]) -> None:
            # the others at once: nothing may touch them any more, the next transfer may own them
            self.free_blocks += set(target) - set(in_flight)
            self.quarantined += in_flight

        order = ReceiveOrder(transfer_id=transfer_id, epoch=1, link=link, num_tokens=num_tokens)
        await prefill.control.call(
            "prefill",
            {
                "transfer_id": transfer_id,
                "decode_worker": DECODE,
                "block_ids": source,
                "num_tokens": num_tokens,
                "chunk": chunk,
                "delay_s": delay_s,
            },
        )
        received = await self.receiver.receive(order, prefill.control, reserve, give_back)
        assert received.commit.choices[0].token_id == transfer_id
        sent = tokens_of(prefill.pool, source, num_tokens)[num_cached:]
        assert torch.equal(sent, tokens_of(self.pool, target, num_tokens)[num_cached:])
        self.free_blocks += target

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.quarantined.remove(block_id)
            if block_id not in self.quarantined:
                self.free_blocks.append(block_id)

    async def close(self) -> None:
        await self.dialer.close()
        await self.receiver.close()
        for prefill in self.prefills.values():
            await prefill.stop()


def mapped_pools() -> list[str]:
    """Pools of prefill processes that this process can read."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "relevo-kv" in line]


@pytest.fixture(autouse=True)
def no_unpickler_under_our_modules() -> None:
    """Not watched here: the control plane of these tests pickles; the workers' own does not."""


@pytest.fixture(params=["gloo", "shared_memory"])
async def decode(request):
    async with opened(request.param, CONFIG["transfer_timeout_s"]) as decode:
        yield decode


@pytest.fixture(params=["gloo", "shared_memory"])
async def hasty_decode(request):
    """Whose operations and links have a short deadline."""
    async with opened(request.param, SHORT_TIMEOUT_S) as decode:
        yield decode


@asynccontextmanager
async def opened(backend: str, transfer_timeout_s: float) -> AsyncIterator[Decode]:
    before = mapped_pools()
    decode = Decode(8, backend, transfer_timeout_s)
    yield decode
    await decode.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("kv-", "abort-"))]
    assert set(mapped_pools()) <= set(before), "a pool is still mapped"
