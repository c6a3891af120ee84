"""KV links against their bare backends: `python -m bench.kv_transfer`, two processes, one host.

Shared memory is measured against a bare copy (`kv_shared_memory.py`), Gloo against bare Gloo:

For each size bare Gloo and our link move the same bytes from and to the same pages in turn, so that
a busy machine slows both alike; the ratio (bare time / our time, 1.0 = no cost) is taken pair by
pair. Times are the receiver's, to the bytes being where they belong: for ours that is the pool. As
in a hand-over the sender plans and gathers the end of a prompt before it is asked (once it has sent
COMMIT), the receiver asks, plans while it waits, and its clock starts with the answer, which the
sender gives as it begins. Bare Gloo is asked for in the same way.
"""

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import torch

from bench import kv_shared_memory
from bench.link_case import CASES, PREFILL_BLOCK, LinkCase, make_layout
from bench.piped_link import build_link
from kv_transfer.message_ranges import MessageRanges
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import RangeOrder

_SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
_CPU = torch.device("cpu")
_TIMEOUT_S = 30.0
_ASKED, _GRANTED = b"?", b"."


class _End:
    """One process's end: a link, a pool per block size, and a pipe that starts each run."""

    def __init__(self, pipe: Connection, rendezvous: Connection, *, is_sender: bool) -> None:
        self._pipe = pipe
        self._is_sender = is_sender
        self._link = build_link(
            rendezvous, is_sender=is_sender, backend="gloo", timeout_s=_TIMEOUT_S
        )

    def measure(self, num_bytes: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
        """Return (bare, ours) seconds of each round, by case."""
        results: dict[str, list[tuple[float, float]]] = {}
        for case in CASES:
            num_tokens = case.num_tokens(num_bytes)
            pool = self._pool(num_tokens, case)
            bare = partial(self._bare_move, _bytes_of(pool, num_tokens))
            ranges, order = self._our_range(pool, num_tokens, case)
            ours = partial(self._our_move, ranges, order)
            prepare = partial(ranges.prepare_send if self._is_sender else ranges.prepare, order)
            self._time(ours)
            self._time(bare)
            results[case.name] = [
                (self._time(bare), self._time(ours, prepare)) for _ in range(rounds)
            ]
        return results

    def _time(self, move: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> float:
        if self._is_sender:
            prepare()
            self._pipe.recv_bytes()
            self._pipe.send_bytes(_GRANTED)
            move()
            return 0.0
        self._pipe.send_bytes(_ASKED)
        prepare()
        self._pipe.recv_bytes()
        started = time.perf_counter()
        move()
        return time.perf_counter() - started

    def _bare_move(self, tensor: torch.Tensor) -> None:
        operation = self._link.send(tensor) if self._is_sender else self._link.receive(tensor)
        operation.wait(_TIMEOUT_S)

    def _pool(self, num_tokens: int, case: LinkCase) -> torch.Tensor:
        layout = make_layout(PREFILL_BLOCK if self._is_sender else case.decode_block)
        shape = (
            layout.num_blocks(num_tokens),
            layout.num_layers,
            2,
            layout.block_size,
            layout.num_kv_heads,
            layout.head_dim,
        )
        return torch.ones(shape, dtype=torch.bfloat16)

    def _our_move(self, ranges: MessageRanges, order: RangeOrder) -> None:
        if self._is_sender:
            ranges.send_range(self._link, order, alter=None)
        else:
            ranges.receive_range(self._link, order, alter=None, is_wanted=True)

    def _our_range(
        self, pool: torch.Tensor, num_tokens: int, case: LinkCase
    ) -> tuple[MessageRanges, RangeOrder]:
        layouts = make_layout(PREFILL_BLOCK), make_layout(case.decode_block)
        ours, theirs = layouts if self._is_sender else layouts[::-1]
        block_ids = list(range(len(pool)))
        if case.is_scattered:
            random.Random(0).shuffle(block_ids)
        ranges = MessageRanges(PoolBlocks(pool, ours), theirs=theirs)
        order = RangeOrder(
            block_ids=block_ids, token_start=0, token_end=num_tokens, timeout_s=_TIMEOUT_S
        )
        return ranges, order

    def close(self) -> None:
        """End the link."""
        self._link.abort("done")
        self._link.close()


def _bytes_of(pool: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """As many bytes of it as the tokens have: the same pages, in one piece."""
    return pool.view(torch.uint8).view(-1)[: num_tokens * make_layout(1).bytes_per_token]


def _send_all(pipe: Connection, rendezvous: Connection, sizes: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    end = _End(pipe, rendezvous, is_sender=True)
    for num_bytes in sizes:
        end.measure(num_bytes, rounds)
    pipe.recv_bytes()
    end.close()


def _print_row(num_bytes: int, name: str, pairs: list[tuple[float, float]]) -> None:
    ratios = sorted(bare / ours for bare, ours in pairs)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    bare_s = statistics.median(bare for bare, _ in pairs)
    print(
        f"{num_bytes >> 10:>8} KiB  {name:<20} bare {num_bytes / bare_s / 1e6:>8.0f} MB/s"
        f"   ratio {statistics.median(ratios):5.2f}  (10%..90%: {low:.2f}..{high:.2f})"
    )


def main() -> None:
    """Run all sizes and print one row for each size and case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--max-mib", type=int, default=256)
    parser.add_argument("--backend", choices=("gloo", "shared_memory"), help="only this one")
    arguments = parser.parse_args()
    sizes = [size for size in _SIZES if size <= arguments.max_mib << 20]
    torch.set_num_threads(1)
    if arguments.backend != "gloo":
        print("shared memory")
        for row in kv_shared_memory.measure(sizes, arguments.rounds):
            _print_row(*row)
    if arguments.backend != "shared_memory":
        print("gloo")
        _measure_gloo(sizes, arguments.rounds)


def _measure_gloo(sizes: list[int], rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    near_store, far_store = context.Pipe()
    child = context.Process(target=_send_all, args=(far, far_store, sizes, rounds))
    child.start()
    end = _End(near, near_store, is_sender=False)
    for num_bytes in sizes:
        pairs = end.measure(num_bytes, rounds)
        for case in CASES:
            _print_row(case.num_bytes(num_bytes), case.name, pairs[case.name])
    near.send_bytes(b".")
    end.close()
    child.join(timedelta(seconds=10).total_seconds())


if __name__ == "__main__":
    main()
