"""Shared memory links: who may map, what is quarantined, and what is left when a process dies."""

import asyncio
import mmap
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from engine.block_pool import BlockPool
from engine.shared_memory import SharedMemory
from kv_transfer.backend import LinkBrokenError, LinkTimeoutError
from kv_transfer.control import WorkerRef
from kv_transfer.shared_memory_channel import SharedMemoryChannel, SharedPool
from kv_transfer.store import RendezvousStore
from tests.integration.kv_transfer import decode_process
from tests.integration.kv_transfer.conftest import CONFIG, NUM_BLOCKS, PROCESSES, mapped_pools
from tests.integration.kv_transfer.prefill_process import PrefillProcess
from tests.unit.kv_transfer.fakes import eventually

TIMEOUT_S = 20.0
NUM_TOKENS = 40
BLOCK_IDS = [7, 3, 11, 2, 9]


@pytest.fixture
def memory() -> SharedMemory:
    memory = SharedMemory(1 << 20)
    memory.tensor((1 << 20,), torch.uint8).copy_(torch.arange(1 << 20) % 251)
    return memory


class Meeting:
    """Both ends of a rendezvous in one process."""

    def __init__(self, memory: SharedMemory) -> None:
        self.pool = SharedPool(memory.descriptor, memory.num_bytes)
        self.store = RendezvousStore(lambda key, value: None, timeout_s=TIMEOUT_S)
        self.is_aborted = threading.Event()

    def serve(self) -> SharedMemoryChannel:
        return SharedMemoryChannel.serve(
            self.store, self.pool, timeout_s=TIMEOUT_S, is_aborted=self.is_aborted.is_set
        )

    def join(self) -> SharedMemoryChannel:
        return SharedMemoryChannel.join(self.store, timeout_s=TIMEOUT_S)


def listening_names() -> set[str]:
    """Names of our sockets that somebody could still connect to."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[-1][1:] for row in rows if row[3] == "00010000" and row[-1].startswith("@relevo-")}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_the_peer_reads_the_pool_and_cannot_write_it(memory: SharedMemory) -> None:
    before = open_descriptors()
    meeting = Meeting(memory)
    with ThreadPoolExecutor(2) as threads:
        serving = threads.submit(meeting.serve)
        reader = meeting.join()
        owner = serving.result()
    assert len(mapped_pools()) == 2, "ours, and the mapping of the peer"
    assert bool((reader.memory == memory.tensor((1 << 20,), torch.uint8).numpy()).all())
    with pytest.raises(ValueError, match="read-only"):
        reader.memory[0] = 1
    assert listening_names() == set(), "a link that is made listens no more"
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, memory.num_bytes)
    with pytest.raises(PermissionError):
        os.truncate(memory.descriptor, 1)

    with ThreadPoolExecutor(1) as threads:
        probing = threads.submit(owner.probe, TIMEOUT_S)
        assert reader.probe(TIMEOUT_S) > 0.0
        probing.result()
    with pytest.raises(LinkTimeoutError):
        owner.wait_given_back(0.05)
    reader.give_back(TIMEOUT_S)
    owner.wait_given_back(TIMEOUT_S)

    owner.abort()
    with pytest.raises(LinkBrokenError, match="aborted"):
        owner.wait_given_back(TIMEOUT_S)
    with pytest.raises(LinkBrokenError, match="closed"):
        reader.probe(TIMEOUT_S)
    owner.close()
    unread = asyncio.create_task(owner.wait_unread())
    await asyncio.sleep(0.05)
    assert not unread.done(), "the peer still maps the pool"
    reader.abort()
    reader.close()
    await asyncio.wait_for(unread, 20.0)
    assert len(mapped_pools()) == 1
    assert open_descriptors() == before


@pytest.mark.parametrize("says", [b"", b"x", b"x" * 32], ids=["silence", "little", "a guess"])
def test_strangers_are_sent_away_and_get_no_descriptor(memory: SharedMemory, says: bytes) -> None:
    meeting = Meeting(memory)
    with ThreadPoolExecutor(2) as threads:
        serving = threads.submit(meeting.serve)
        meeting.store.get("shared_memory")
        (name,) = listening_names()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(f"\0{name}")
            stranger.sendall(says)
            reader = meeting.join()
            assert socket.recv_fds(stranger, 8, 1)[:2] == (b"", [])
        owner = serving.result()
    assert reader.memory is not None
    reader.close()
    owner.close()


def test_waiting_for_a_peer_ends_with_the_link(memory: SharedMemory) -> None:
    before = open_descriptors()
    meeting = Meeting(memory)
    meeting.is_aborted.set()
    with pytest.raises(LinkBrokenError, match="aborted"):
        meeting.serve()
    assert open_descriptors() == before


@dataclass
class Lender:
    """The prefill side in the test's process, with real books, and a decode process."""

    plane: PrefillProcess
    blocks: BlockPool
    process: BaseProcess
    pipe: Connection
    server: asyncio.Server

    @property
    def num_quarantined(self) -> int:
        self.blocks.check_integrity()
        return self.blocks.counts().quarantined

    async def prefill(self, transfer_id: int) -> None:
        """Compute a prompt and let the decode process fetch it."""
        self.blocks.acquire(BLOCK_IDS)
        self.pipe.send(transfer_id)
        await self.plane.prefill(
            transfer_id, WorkerRef("decode-0", 5), BLOCK_IDS, NUM_TOKENS, NUM_TOKENS, 0.0
        )

    def give_back(self, transfer_id: int, still_read: list[int]) -> None:
        self.plane.given_back.append(transfer_id)
        self.blocks.quarantine(still_read)
        self.blocks.free(BLOCK_IDS)


StartLender = Callable[..., object]


@pytest.fixture
async def start_lender() -> AsyncIterator[StartLender]:
    lenders: list[Lender] = []

    async def start(*faults: dict, transfer_timeout_s: float = 20.0) -> Lender:
        changes = {"backend": "shared_memory", "transfer_timeout_s": transfer_timeout_s}
        config = {**CONFIG, **changes}
        options = {"config": config, "layout": {"block_size": 8}, "num_blocks": NUM_BLOCKS}
        plane = PrefillProcess({**options, "worker_id": "prefill-0", "seed": 1})
        blocks = BlockPool(NUM_BLOCKS)
        server = await asyncio.start_server(plane.handle, "127.0.0.1", 0)
        options |= {
            "port": server.sockets[0].getsockname()[1],
            "incarnation": 5,
            "prefill_worker": (plane.worker.worker_id, plane.worker.incarnation),
            "num_tokens": NUM_TOKENS,
        }
        pipe, far = PROCESSES.Pipe()
        process = PROCESSES.Process(
            target=decode_process.run, args=(options, list(faults), far), daemon=True
        )
        process.start()
        far.close()
        lender = Lender(plane, blocks, process, pipe, server)
        plane.give_back = lender.give_back
        plane.sender._end_quarantine = blocks.end_quarantine
        lenders.append(lender)
        await asyncio.to_thread(pipe.recv)
        return lender

    yield start
    for lender in lenders:
        lender.process.kill()
        await asyncio.to_thread(lender.process.join)
        lender.pipe.close()
        await lender.plane.acceptor.close()
        await lender.plane.sender.close()
        lender.server.close()
        assert lender.num_quarantined == 0
        assert lender.blocks.counts().free == NUM_BLOCKS
    assert listening_names() == set()


@pytest.mark.parametrize("end", ["release", "cancel", "lease"])
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGCONT], ids=["killed", "woken"])
async def test_what_a_frozen_peer_may_still_read_is_quarantined_until_it_cannot(
    start_lender: StartLender, fate: signal.Signals, end: str
) -> None:
    """The peer freezes with the lent blocks before its eyes; then the request ends here."""
    lender = await start_lender({"point": "kv_recv", "action": "freeze"}, transfer_timeout_s=1.0)
    sender = lender.plane.sender
    await lender.prefill(1)
    await eventually(lambda: any(held.lent for held in sender._table))
    if end == "release":
        sender.release(1, epoch=1)
    elif end == "cancel":
        sender.cancel(1)
    # else nobody follows once its control connections time out: the hold ends as a lease does
    else:
        for held in sender._table:
            held.machine._hold_deadline = 0.0
        sender.expire()
    assert lender.plane.given_back == [1]
    assert lender.num_quarantined == len(BLOCK_IDS)
    assert lender.blocks.counts().used == 0
    # past the operation's deadline the link is gone; its reader is not
    await eventually(lambda: not lender.plane.acceptor.statuses())
    await asyncio.sleep(0.2)
    assert lender.num_quarantined == len(BLOCK_IDS)

    os.kill(lender.process.pid, fate)
    await eventually(lambda: lender.num_quarantined == 0)
    assert lender.blocks.counts().free == NUM_BLOCKS


async def test_a_copy_that_ends_after_its_request_ends_the_quarantine(
    start_lender: StartLender,
) -> None:
    lender = await start_lender({"point": "kv_recv", "action": "delay", "delay_s": 0.4})
    sender = lender.plane.sender
    await lender.prefill(1)
    await eventually(lambda: any(held.lent for held in sender._table))
    sender.cancel(1)
    assert lender.num_quarantined == len(BLOCK_IDS)
    await eventually(lambda: lender.num_quarantined == 0)
    # acknowledged, not broken: the link serves the next one
    assert [status.generation for status in lender.plane.acceptor.statuses()] == [1]
    await asyncio.to_thread(lender.pipe.recv)
    await lender.prefill(2)
    assert await asyncio.to_thread(lender.pipe.recv) == "received"
    await eventually(lambda: 2 in lender.plane.given_back)


async def test_a_killed_reader_gives_everything_back_at_once(start_lender: StartLender) -> None:
    lender = await start_lender({"point": "kv_recv", "action": "kill"})
    await lender.prefill(1)
    await eventually(lambda: not lender.plane.acceptor.statuses(), 10.0)
    lender.plane.sender.cancel(1)
    await eventually(lambda: lender.num_quarantined == 0, 10.0)
