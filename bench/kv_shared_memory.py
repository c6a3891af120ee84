"""Shared memory links against a bare copy of the same bytes; a part of `bench.kv_transfer`.

In turn the decode process copies bytes from the prefill process's mapped pages by hand, and our
link moves a range of the same size into blocks. The clock of a range starts with the answer to a
fetch, which names the blocks that are lent. It ends when the bytes are in the
blocks; giving back comes after whoever waited for them was told. Every copy reads other pages than
the one before, as no KV is handed over twice.
"""

import mmap
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import torch

from bench.link_case import CASES, PREFILL_BLOCK, LinkCase, make_layout
from bench.piped_link import build_link
from engine.shared_memory import SharedMemory
from kv_transfer.layout import KVLayout
from kv_transfer.link import Link
from kv_transfer.mapped_ranges import MappedRanges
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import RangeOrder
from kv_transfer.shared_memory_channel import Pages, SharedPool

_TIMEOUT_S = 30.0
_POOL_BYTES = 256 << 20
_BARE, _OURS, _DONE = b"bare", b"ours", b"done"
_LENT = b"."


def measure(sizes: list[int], rounds: int) -> Iterator[tuple[int, str, list[tuple[float, float]]]]:
    """Yield (bytes, case, [(bare seconds, our seconds) of each round])."""
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    rendezvous, far_rendezvous = context.Pipe()
    layout = make_layout(PREFILL_BLOCK)
    num_blocks = -(-max(4 * max(sizes), _POOL_BYTES) // layout.bytes_per_block)
    child = context.Process(
        target=_lend_all, args=(far, far_rendezvous, layout, num_blocks), daemon=True
    )
    child.start()
    link = build_link(rendezvous, is_sender=False, backend="shared_memory", timeout_s=_TIMEOUT_S)
    try:
        for num_bytes in sizes:
            for case in CASES:
                move = _Move(link, case, case.num_tokens(num_bytes))
                move.warm_up()
                times = [move.time_both(pipe, each) for each in range(rounds)]
                yield case.num_bytes(num_bytes), case.name, times
    finally:
        pipe.send_bytes(_DONE)
        link.abort("done")
        link.close()
        child.join(10.0)


class _Move:
    """One size and case on the decode side."""

    def __init__(self, link: Link, case: LinkCase, num_tokens: int) -> None:
        theirs, ours = make_layout(PREFILL_BLOCK), make_layout(case.decode_block)
        shape = (
            ours.num_blocks(num_tokens),
            ours.num_layers,
            2,
            ours.block_size,
            ours.num_kv_heads,
            ours.head_dim,
        )
        self._link = link
        blocks = PoolBlocks(torch.ones(shape, dtype=torch.bfloat16), ours)
        self._mover = MappedRanges(blocks, theirs=theirs)
        # whole pages, as a pool has them: into numpy's own, 16 bytes off, memcpy may take thrice as
        # long
        self._target = np.frombuffer(mmap.mmap(-1, num_tokens * ours.bytes_per_token), np.uint8)
        self._theirs = theirs
        self._order = _order(_ids(shape[0], 0, shape[0], case.is_scattered), num_tokens)
        self._is_scattered = case.is_scattered

    def _memory(self) -> Pages:
        memory = self._link.shared_memory.memory
        assert memory is not None
        return memory

    def warm_up(self) -> None:
        """Pay for the pages of the mapping and of the target."""
        size = len(self._target)
        for start in range(0, len(self._memory()) - size, size):
            np.copyto(self._target, self._memory()[start : start + size])

    def time_both(self, pipe: Connection, number: int) -> tuple[float, float]:
        """Copy by hand and over the link, round `number`."""
        size = self._theirs.num_blocks(self._order.token_end)
        total = len(self._memory()) // self._theirs.bytes_per_block
        starts = [(2 * number + each) * size % (total - size) for each in (0, 1)]
        offset = starts[0] * self._theirs.bytes_per_block
        pages = self._memory()[offset : offset + len(self._target)]
        # just woken by the other process, as a decode worker is when its range is granted
        pipe.send_bytes(_BARE)
        pipe.recv_bytes()
        started = time.perf_counter()
        np.copyto(self._target, pages)
        bare_s = time.perf_counter() - started
        order = replace(self._order, lent=_ids(size, starts[1], total, self._is_scattered))
        pipe.send_bytes(_OURS)
        self._mover.prepare(order)
        pipe.recv_bytes()
        started = time.perf_counter()
        self._mover.receive_range(self._link, order, alter=None, is_wanted=True)
        ours_s = time.perf_counter() - started
        self._link.shared_memory.give_back(_TIMEOUT_S)
        return bare_s, ours_s


def _lend_all(pipe: Connection, rendezvous: Connection, layout: KVLayout, num_blocks: int) -> None:
    """The prefill process: answer, and wait for what was lent, until there is nothing to lend."""
    torch.set_num_threads(1)
    shape = (num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads)
    memory = SharedMemory(num_blocks * layout.bytes_per_block)
    memory.tensor((*shape, layout.head_dim), torch.bfloat16).fill_(1)
    link = build_link(
        rendezvous,
        is_sender=True,
        backend="shared_memory",
        timeout_s=_TIMEOUT_S,
        shared_pool=SharedPool(memory.descriptor, memory.num_bytes),
    )
    channel = link.shared_memory
    while (asked := pipe.recv_bytes()) != _DONE:
        pipe.send_bytes(_LENT)
        if asked == _OURS:
            channel.wait_given_back(_TIMEOUT_S)
    link.abort("done")
    link.close()


def _ids(size: int, start: int, total: int, is_scattered: bool) -> list[int]:
    """Block ids of one range, side by side from `start` or from all over the pool."""
    if is_scattered:
        return random.Random(start).sample(range(total), size)
    return list(range(start, start + size))


def _order(block_ids: list[int], num_tokens: int) -> RangeOrder:
    return RangeOrder(
        block_ids=block_ids, token_start=0, token_end=num_tokens, timeout_s=_TIMEOUT_S
    )
