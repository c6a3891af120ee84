"""The prefill side's table of hand-overs, by transfer id."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch

from kv_transfer.accepted_link import AcceptedLink
from kv_transfer.control import ChunkDigest
from kv_transfer.moved_range import MovedRange
from kv_transfer.range_mover import RangeOrder
from kv_transfer.sender_state import SenderTransfer


class HeldTransfer:
    """One open hand-over: its machine, its blocks and whoever waits for news of it."""

    def __init__(
        self,
        machine: SenderTransfer,
        on_release: Callable[[Sequence[int]], None],
        on_sent: Callable[[MovedRange], None],
    ) -> None:
        self.machine = machine
        self.on_sent = on_sent
        # blocks of tokens [0, num_offered) at least
        self.block_ids: list[int] = []
        # digests of the ranges granted so far, in ticket order
        self.digests: list[ChunkDigest] = []
        # what the peer may be reading from the pool itself, a list for each operation
        self.lent: list[Sequence[int]] = []
        # the last range as one link will send it, made ready before it is asked for
        self.prepared: tuple[AcceptedLink, RangeOrder] | None = None
        self.is_given_back = False
        self.timer: asyncio.TimerHandle | None = None
        self._on_release = on_release
        self._news: set[asyncio.Event] = set()
        self._computed: torch.cuda.Event | None = None

    def tell(self) -> None:
        """Wake everyone who waits for news."""
        for event in self._news:
            event.set()

    def subscribe(self) -> asyncio.Event:
        """Return an event that each piece of news sets."""
        event = asyncio.Event()
        self._news.add(event)
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        """Stop setting an event."""
        self._news.discard(event)

    def mark_computed(self, pool: torch.Tensor) -> None:
        """Note how far the device's queue has to get until the offered tokens are really there."""
        if pool.device.type == "cuda":
            self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._computed.record(torch.cuda.current_stream(pool.device))

    def is_computed(self) -> bool:
        """Whether a send could run at once: one that waits would spin on the receiver too."""
        return self._computed is None or bool(self._computed.query())  # type: ignore[no-untyped-call]

    def prepared_for(
        self, link: AcceptedLink, token_start: int, token_end: int
    ) -> RangeOrder | None:
        """What was made ready for this very range and link, if anything was."""
        if self.prepared is None:
            return None
        its_link, order = self.prepared
        if its_link is not link or order.token_start != token_start:
            return None
        return order if order.token_end == token_end else None

    def give_back(self) -> None:
        """Return the blocks to their owner, with what of them the peer may still read; once."""
        assert not self.is_given_back
        self.is_given_back = True
        if self.timer is not None:
            self.timer.cancel()
        self.tell()
        self._on_release([block_id for block_ids in self.lent for block_id in block_ids])


class TransferTable:
    """Open transfers, who waits for one to appear, and which ended lately.

    An id that ended is remembered, so that a late or early message about it is answered at once.
    """

    def __init__(self, *, remember_s: float, now: Callable[[], float]) -> None:
        self._remember_s = remember_s
        self._now = now
        self._open: dict[int, HeldTransfer] = {}
        self._ended: OrderedDict[int, float] = OrderedDict()
        self._awaited: dict[int, set[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[HeldTransfer]:
        return iter(list(self._open.values()))

    def get(self, transfer_id: int) -> HeldTransfer | None:
        """Return an open transfer."""
        return self._open.get(transfer_id)

    def add(self, transfer_id: int, held: HeldTransfer) -> None:
        """Open a transfer and tell who waited for it."""
        assert transfer_id not in self._open
        self._open[transfer_id] = held
        self._answer(transfer_id)

    def remove(self, transfer_id: int) -> None:
        """Close a transfer and remember it."""
        self._open.pop(transfer_id, None)
        self.remember(transfer_id)

    def remember(self, transfer_id: int) -> None:
        """Note that this id ended, also when it never began here."""
        now = self._now()
        self._ended[transfer_id] = now
        self._ended.move_to_end(transfer_id)
        while self._ended and next(iter(self._ended.values())) < now - self._remember_s:
            self._ended.popitem(last=False)
        self._answer(transfer_id)

    def has_ended(self, transfer_id: int) -> bool:
        """Whether this id ended not long ago."""
        ended_at = self._ended.get(transfer_id)
        return ended_at is not None and ended_at >= self._now() - self._remember_s

    async def find(self, transfer_id: int, *, timeout_s: float) -> HeldTransfer | None:
        """Return an open transfer, waiting for it to appear unless it ended before."""
        if transfer_id not in self._open and not self.has_ended(transfer_id):
            appeared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting = self._awaited.setdefault(transfer_id, set())
            waiting.add(appeared)
            try:
                await asyncio.wait({appeared}, timeout=timeout_s)
            finally:
                waiting.discard(appeared)
                if not waiting and self._awaited.get(transfer_id) is waiting:
                    del self._awaited[transfer_id]
        return self._open.get(transfer_id)

    def _answer(self, transfer_id: int) -> None:
        for appeared in self._awaited.pop(transfer_id, ()):
            if not appeared.done():
                appeared.set_result(None)
