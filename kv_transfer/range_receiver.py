"""Carries out what was granted on the decode side: the operation and its digest."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kv_transfer.config import KVTransferConfig
from kv_transfer.control import WorkerRef
from kv_transfer.digest import range_digest
from kv_transfer.faulty_range import ask_fault_plan
from kv_transfer.layout import KVLayout, block_range
from kv_transfer.link import Link
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.pool_writes import PoolWrites
from kv_transfer.range_mover import RangeOrder
from kv_transfer.receive_order import ReceiveOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceptionSettings:
    """What all receptions of one decode worker share."""

    pool: torch.Tensor
    blocks: PoolBlocks
    layout: KVLayout
    worker: WorkerRef
    config: KVTransferConfig
    end_quarantine: Callable[[Sequence[int]], None]
    now: Callable[[], float] = time.monotonic


class RangeReceiver:
    """Writes the ranges of one reception into its blocks, as long as they are its own."""

    def __init__(self, settings: ReceptionSettings, order: ReceiveOrder) -> None:
        # known before the first range is asked for
        self.block_ids: Sequence[int] = ()
        # summed over the operations
        self.transfer_s = 0.0
        self._settings = settings
        self._order = order
        self._writes = PoolWrites(settings.end_quarantine)

    def expect(self, token_start: int, token_end: int) -> RangeOrder:
        """What will be received when tokens [token_start, token_end) are granted."""
        return RangeOrder(
            block_ids=self.block_ids,
            token_start=token_start,
            token_end=token_end,
            timeout_s=self._settings.config.transfer_timeout_s,
        )

    def prepare(self, order: RangeOrder) -> None:
        """Do ahead what can be done while the peer is asked; on the event loop."""
        live = self._order.link.live
        if not live.ended.done():
            live.ranges(self._settings.blocks).prepare(order)

    def receive(self, order: RangeOrder, link: Link, lent: Sequence[int]) -> int:
        """Receive a range; returns the bytes. On the link's thread."""
        settings = self._settings
        started = time.monotonic()
        spoil = ask_fault_plan("kv_recv", link, request_label=self._order.request_label)
        first, end = block_range(order.token_start, order.token_end, settings.layout.block_size)
        with self._writes.of(self.block_ids[first:end]) as is_wanted:
            num_bytes = self._order.link.live.ranges(settings.blocks).receive_range(
                link,
                replace(order, lent=lent) if lent else order,
                alter=spoil,
                is_wanted=is_wanted,
            )
        self.transfer_s += time.monotonic() - started
        return num_bytes

    async def digest(self, token_start: int, token_end: int) -> bytes:
        """Hash what arrived."""
        return await asyncio.to_thread(
            range_digest, self._settings.pool, self.block_ids, token_start, token_end
        )

    def close(self) -> list[int]:
        """Write nothing any more; the blocks that are still being written."""
        return self._writes.close()
