"""Both ends of the KV plane in one process: no sockets, no gRPC."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import torch

from kv_transfer.backend import LinkBrokenError, LinkTimeoutError
from kv_transfer.config import KVTransferConfig
from kv_transfer.control import (
    ControlClosedError,
    FetchOrder,
    FetchReply,
    LinkMessage,
    LinkOpen,
    PeerInfo,
    TransferMessage,
    WorkerRef,
)
from kv_transfer.layout import KVLayout
from kv_transfer.link import LinkSpec
from kv_transfer.link_acceptor import LinkAcceptor
from kv_transfer.link_dialer import LinkDialer
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.sender_state import SenderOrder
from kv_transfer.store import RendezvousStore

PREFILL = WorkerRef("prefill-0", 11)
DECODE = WorkerRef("decode-0", 22)
CPU = torch.device("cpu")


def make_layout(block_size: int = 4, **changes: object) -> KVLayout:
    fields = {
        "model_id": "tiny",
        "model_revision": "1",
        "dtype": "float32",
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "block_size": block_size,
        "hash_scheme": "sha256-v1",
    }
    return KVLayout(**{**fields, **changes})


def make_pool(layout: KVLayout, num_blocks: int, *, seed: int | None = None) -> torch.Tensor:
    shape = (
        num_blocks,
        layout.num_layers,
        2,
        layout.block_size,
        layout.num_kv_heads,
        layout.head_dim,
    )
    if seed is None:
        return torch.zeros(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens_of(pool: torch.Tensor, block_ids: list[int], num_tokens: int) -> torch.Tensor:
    """[num_tokens, num_layers, 2, num_kv_heads, head_dim], written the slow way."""
    size = pool.shape[3]
    return torch.stack([pool[block_ids[t // size], :, :, t % size] for t in range(num_tokens)])


async def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event of its own
            await asyncio.sleep(0.002)


class Wire:
    """What two fake ends share: posted sends meet posted receives in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sends: list[FakeOperation] = []
        self.receives: list[FakeOperation] = []
        self.num_moved = 0
        self.broken = ""

    def post(self, queue: "list[FakeOperation]", tensor: torch.Tensor) -> "FakeOperation":
        with self.changed:
            if self.broken:
                raise LinkBrokenError(self.broken)
            operation = FakeOperation(self, tensor)
            queue.append(operation)
            while self.num_moved < min(len(self.sends), len(self.receives)):
                source, target = self.sends[self.num_moved], self.receives[self.num_moved]
                assert source.tensor.numel() == target.tensor.numel(), "sizes differ"
                target.tensor.copy_(source.tensor)
                source.is_done = target.is_done = True
                self.num_moved += 1
            self.changed.notify_all()
            return operation

    def break_(self, reason: str) -> None:
        with self.changed:
            self.broken = self.broken or reason
            self.changed.notify_all()


class FakeOperation:
    def __init__(self, wire: Wire, tensor: torch.Tensor) -> None:
        self.wire, self.tensor, self.is_done = wire, tensor, False

    def wait(self, timeout_s: float) -> None:
        with self.wire.changed:
            self.wire.changed.wait_for(lambda: self.is_done or self.wire.broken, timeout_s)
            if self.is_done:
                return
            if self.wire.broken:
                raise LinkBrokenError(self.wire.broken)
        self.wire.break_("timed out")
        raise LinkTimeoutError("timed out")


class FakeLink:
    """Stands in for `Link`: same verbs, no torch.distributed."""

    def __init__(self, wire: Wire, spec: LinkSpec, store: RendezvousStore) -> None:
        self.wire, self.spec, self.store, self.device = wire, spec, store, CPU
        self.aborted = threading.Event()

    def build(self) -> None:
        mine, theirs = ("p", "d") if self.spec.is_sender else ("d", "p")
        self.store.set(mine, b"here")
        assert self.store.get(theirs) == b"here"

    def probe(self) -> float:
        return 1e9

    def send(self, tensor: torch.Tensor) -> FakeOperation:
        return self.wire.post(self.wire.sends, tensor)

    def receive(self, tensor: torch.Tensor) -> FakeOperation:
        return self.wire.post(self.wire.receives, tensor)

    def abort(self, reason: str) -> None:
        self.aborted.set()
        self.store.close(reason)
        self.wire.break_(reason)

    def wait_aborted(self, timeout_s: float) -> bool:
        return self.aborted.wait(timeout_s)

    def close(self) -> None:
        assert self.aborted.is_set()

    async def wait_unread(self) -> None:
        return


class Wires:
    """Makes fake links; both ends of one link id share a wire."""

    def __init__(self) -> None:
        self.by_id: dict[str, Wire] = {}
        self.lock = threading.Lock()

    def make(self, spec: LinkSpec, store: RendezvousStore) -> FakeLink:
        with self.lock:
            wire = self.by_id.setdefault(spec.link_id, Wire())
        return FakeLink(wire, spec, store)


class QueueControl:
    """One end of a LinkControl over two queues."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[LinkMessage | None] = asyncio.Queue()
        self.other: QueueControl | None = None
        self.is_closed = False

    async def send(self, message: LinkMessage) -> None:
        if self.is_closed:
            raise ControlClosedError("closed")
        self.other.inbox.put_nowait(message)

    async def receive(self) -> LinkMessage:
        if self.is_closed and self.inbox.empty():
            raise ControlClosedError("closed")
        message = await self.inbox.get()
        if message is None:
            raise ControlClosedError("closed by the other end")
        return message

    async def close(self) -> None:
        for end in (self, self.other):
            if not end.is_closed:
                end.is_closed = True
                end.inbox.put_nowait(None)


def control_pair() -> tuple[QueueControl, QueueControl]:
    first, second = QueueControl(), QueueControl()
    first.other, second.other = second, first
    return first, second


@dataclass
class DirectControl:
    """Calls a sender in the same process; hooks let a test lose or delay a call."""

    sender: KVSender
    before_fetch: list[Exception] = field(default_factory=list)
    after_fetch: list[Exception] = field(default_factory=list)
    before_release: list[Exception] = field(default_factory=list)
    fetches: list[FetchOrder] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    num_watches: int = 0

    async def watch(
        self, transfer_id: int, *, epoch: int, decode_worker: WorkerRef
    ) -> AsyncIterator[TransferMessage]:
        self.num_watches += 1
        stream = self.sender.watch(transfer_id, epoch=epoch, decode_worker=decode_worker)
        try:
            async for message in stream:
                yield message
        finally:
            await stream.aclose()

    async def fetch(self, order: FetchOrder) -> FetchReply:
        self.fetches.append(order)
        if self.before_fetch:
            raise self.before_fetch.pop(0)
        reply = await self.sender.fetch(order)
        if self.after_fetch:
            raise self.after_fetch.pop(0)
        return reply

    async def release(self, transfer_id: int, *, epoch: int) -> None:
        if self.before_release:
            raise self.before_release.pop(0)
        self.released.append(transfer_id)
        self.sender.release(transfer_id, epoch=epoch)


@dataclass
class Reservation:
    block_ids: list[int]
    num_cached_tokens: int = 0


# No deadline of these passes while a busy machine pauses; those of the others soon do.
PATIENT = KVTransferConfig(transfer_timeout_s=20.0, lease_s=20.0, digest_sample=1.0)
HASTY = KVTransferConfig(transfer_timeout_s=1.0, lease_s=0.5, digest_sample=1.0)


class Pair:
    """A prefill and a decode worker's KV plane, linked over a fake wire."""

    def __init__(
        self,
        *,
        prefill_block: int = 4,
        decode_block: int = 4,
        config: KVTransferConfig = PATIENT,
        make_link: Callable | None = None,
    ) -> None:
        self.config = config
        self.p_layout, self.d_layout = make_layout(prefill_block), make_layout(decode_block)
        self.p_pool = make_pool(self.p_layout, 64, seed=1)
        self.d_pool = make_pool(self.d_layout, 64)
        self.wires = Wires()
        make_link = make_link or self.wires.make
        self.acceptor = LinkAcceptor(
            LinkIdentity(worker=PREFILL, layout=self.p_layout, device=CPU),
            config=self.config,
            make_link=make_link,
        )
        self.serving: set[asyncio.Task[None]] = set()
        self.dialer = LinkDialer(
            LinkIdentity(worker=DECODE, layout=self.d_layout, device=CPU),
            config=self.config,
            connect=self.connect,
            make_link=make_link,
        )
        self.quarantine_ended: list[int] = []
        self.sender = KVSender(
            self.p_pool,
            layout=self.p_layout,
            config=self.config,
            acceptor=self.acceptor,
            end_quarantine=self.quarantine_ended.extend,
        )
        # of the decode side: what was given back while an operation wrote it, and what it ended
        self.given_up: list[int] = []
        self.d_quarantine_ended: list[int] = []
        self.receiver = KVReceiver(
            self.d_pool,
            layout=self.d_layout,
            worker=DECODE,
            config=self.config,
            end_quarantine=self.d_quarantine_ended.extend,
        )
        self.control = DirectControl(self.sender)
        self.given_back: list[int] = []
        # blocks of the decode side that no transfer of the test has had yet
        self.free_blocks = random.Random(1).sample(range(64), 64)

    def connect(self, _peer: PeerInfo) -> QueueControl:
        near, far = control_pair()
        task = asyncio.get_running_loop().create_task(self.accept(far))
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)
        return near

    async def accept(self, control: QueueControl) -> None:
        message = await control.receive()
        assert isinstance(message, LinkOpen)
        try:
            await self.acceptor.serve(message, control)
        finally:
            await control.close()

    async def link_up(self, timeout_s: float = 20.0) -> None:
        self.dialer.set_peers("ingress", [PeerInfo(worker=PREFILL, address="here")])
        await eventually(lambda: self.dialer.link_for(PREFILL.worker_id), timeout_s)

    @property
    def link(self):
        link = self.dialer.link_for(PREFILL.worker_id)
        assert link is not None
        return link

    def open(self, transfer_id: int, num_tokens: int, epoch: int = 1) -> None:
        self.sender.open(
            SenderOrder(
                transfer_id=transfer_id, epoch=epoch, decode_worker=DECODE, num_tokens=num_tokens
            ),
            lambda still_read: self.given_back.append(transfer_id),
        )

    async def close(self) -> None:
        await self.dialer.close()
        await self.acceptor.close()
        await self.sender.close()
        await self.receiver.close()
        await asyncio.gather(*self.serving, return_exceptions=True)
