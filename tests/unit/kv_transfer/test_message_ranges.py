"""Ranges over messages: which bytes travel where they lie, and what passes by."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kv_transfer.backend import LinkTimeoutError
from kv_transfer.link import LinkSpec
from kv_transfer.message_ranges import MessageRanges
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.range_mover import RangeOrder
from kv_transfer.store import RendezvousStore
from tests.unit.kv_transfer.fakes import CPU, FakeLink, Wire, make_layout, make_pool, tokens_of

NUM_BLOCKS = 16


def make_link(wire: Wire, *, is_sender: bool) -> FakeLink:
    spec = LinkSpec(link_id="a", is_sender=is_sender, backend="gloo", timeout_s=5.0, device=CPU)
    return FakeLink(wire, spec, RendezvousStore(lambda key, value: None, timeout_s=1.0))


class Move:
    """One range from a prefill to a decode pool."""

    def __init__(
        self, p_block: int, d_block: int, start: int, end: int, *, is_wanted: bool = True
    ) -> None:
        layouts = make_layout(p_block), make_layout(d_block)
        self.source = make_pool(layouts[0], NUM_BLOCKS, seed=3)
        self.target = make_pool(layouts[1], NUM_BLOCKS)
        self.source_ids, self.target_ids = [7, 2, 9, 4], [3, 11, 5, 8, 1, 6, 0, 2]
        self.wire = Wire()
        sender = MessageRanges(PoolBlocks(self.source, layouts[0]), theirs=layouts[1])
        receiver = MessageRanges(PoolBlocks(self.target, layouts[1]), theirs=layouts[0])
        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(
                sender.send_range,
                make_link(self.wire, is_sender=True),
                RangeOrder(
                    block_ids=self.source_ids, token_start=start, token_end=end, timeout_s=5.0
                ),
                alter=None,
            )
            received = receiver.receive_range(
                make_link(self.wire, is_sender=False),
                RangeOrder(
                    block_ids=self.target_ids, token_start=start, token_end=end, timeout_s=5.0
                ),
                alter=None,
                is_wanted=is_wanted,
            )
            assert sending.result() == received == (end - start) * layouts[0].bytes_per_token

    def num_in_place(self) -> tuple[int, int]:
        """Bytes that were sent from, and received into, the pools themselves."""
        return tuple(
            sum(each.tensor.numel() for each in posted if _lies_in(each.tensor, pool))
            for posted, pool in ((self.wire.sends, self.source), (self.wire.receives, self.target))
        )


def _lies_in(tensor: torch.Tensor, pool: torch.Tensor) -> bool:
    start = pool.data_ptr()
    return start <= tensor.data_ptr() < start + pool.numel() * pool.element_size()


@pytest.mark.parametrize(("start", "end"), [(0, 8), (0, 16), (3, 14), (3, 13), (5, 7)])
def test_scattered_blocks_arrive_where_they_belong(start: int, end: int) -> None:
    move = Move(4, 4, start, end)
    sent = tokens_of(move.source, move.source_ids, end)[start:]
    assert torch.equal(sent, tokens_of(move.target, move.target_ids, end)[start:])


def test_blocks_of_their_own_piece_are_copied_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout(4)
    monkeypatch.setattr("kv_transfer.message_ranges.PIECE_BYTES", layout.bytes_per_block)
    whole = 2 * layout.bytes_per_block
    assert Move(4, 4, 0, 8).num_in_place() == (whole, whole)
    # the smaller part of a block travels by tokens, the larger one with the rest of its block
    assert Move(4, 4, 0, 9).num_in_place() == (whole, whole)
    assert Move(4, 4, 0, 10).num_in_place() == (3 * layout.bytes_per_block,) * 2
    assert Move(4, 4, 1, 3).num_in_place() == (0, 0)


def test_of_unequal_blocks_the_larger_ones_are_copied_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = make_layout(4)
    monkeypatch.setattr("kv_transfer.message_ranges.PIECE_BYTES", layout.bytes_per_block)
    assert Move(4, 2, 0, 8).num_in_place() == (2 * layout.bytes_per_block, 0)
    assert Move(2, 4, 0, 8).num_in_place() == (0, 2 * layout.bytes_per_block)


@pytest.mark.parametrize(("start", "end"), [(0, 13), (3, 14), (3, 13), (5, 7), (1, 10)])
def test_parts_of_blocks_are_sent_as_they_were_copied_ahead(
    start: int, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout(4)
    monkeypatch.setattr("kv_transfer.message_ranges.PIECE_BYTES", layout.bytes_per_block)
    pool = make_pool(layout, NUM_BLOCKS, seed=3)
    ids, wire = [7, 2, 9, 4], Wire()
    blocks = PoolBlocks(pool, layout)
    ranges = MessageRanges(blocks, theirs=layout)
    order = RangeOrder(block_ids=ids, token_start=start, token_end=end, timeout_s=5.0)
    ranges.prepare_send(order)
    monkeypatch.setattr(blocks, "gather", None)  # nothing is left to gather
    target, target_ids = make_pool(layout, NUM_BLOCKS), [3, 11, 5, 8]
    receiver = MessageRanges(PoolBlocks(target, layout), theirs=layout)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(
            ranges.send_range, make_link(wire, is_sender=True), order, alter=None
        )
        receiver.receive_range(
            make_link(wire, is_sender=False),
            RangeOrder(block_ids=target_ids, token_start=start, token_end=end, timeout_s=5.0),
            alter=None,
            is_wanted=True,
        )
        sending.result()
    sent = tokens_of(pool, ids, end)[start:]
    assert torch.equal(sent, tokens_of(target, target_ids, end)[start:])


def test_of_unequal_blocks_nothing_is_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = PoolBlocks(make_pool(make_layout(4), NUM_BLOCKS), make_layout(4))
    ranges = MessageRanges(blocks, theirs=make_layout(2))
    monkeypatch.setattr(blocks, "gather", None)
    ranges.prepare_send(
        RangeOrder(block_ids=[7, 2, 9, 4], token_start=0, token_end=16, timeout_s=5.0)
    )


def test_what_nobody_wants_any_more_passes_by() -> None:
    move = Move(4, 4, 0, 14, is_wanted=False)
    assert move.num_in_place()[1] == 0
    assert not bool(move.target.any())


class SilentLink:
    """Posts, and says in which order operations are waited for; some of those fail."""

    device = CPU

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing
        self.num_posted = 0
        self.waited: list[tuple[int, int]] = []
        self.aborted = ""

    def receive(self, _tensor: torch.Tensor) -> "SilentOperation":
        self.num_posted += 1
        return SilentOperation(self, self.num_posted - 1)

    def abort(self, reason: str) -> None:
        self.aborted = reason


class SilentOperation:
    def __init__(self, link: SilentLink, number: int) -> None:
        self.link, self.number = link, number

    def wait(self, _timeout_s: float) -> None:
        self.link.waited.append((self.number, self.link.num_posted))
        if self.number == self.link.failing:
            raise LinkTimeoutError("too late")


def receive_in_place(link: SilentLink, num_blocks: int = 8) -> None:
    layout = make_layout(4)
    ranges = MessageRanges(PoolBlocks(make_pool(layout, NUM_BLOCKS), layout), theirs=layout)
    order = RangeOrder(
        block_ids=[2 * each for each in range(num_blocks)],
        token_start=0,
        token_end=4 * num_blocks,
        timeout_s=5.0,
    )
    ranges.receive_range(link, order, alter=None, is_wanted=True)


def test_all_that_lies_in_place_is_posted_at_once_and_only_the_last_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_transfer.message_ranges.PIECE_BYTES", make_layout(4).bytes_per_block)
    link = SilentLink()
    receive_in_place(link)
    assert link.waited == [(7, 8)]


def test_what_was_posted_is_waited_for_once_also_when_an_operation_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_transfer.message_ranges.PIECE_BYTES", make_layout(4).bytes_per_block)
    link = SilentLink(failing=7)
    with pytest.raises(LinkTimeoutError):
        receive_in_place(link)
    assert "too late" in link.aborted
    assert sorted(number for number, _ in link.waited) == list(range(8))


def test_a_range_that_was_prepared_is_not_cut_again_and_another_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = make_layout(4)
    ranges = MessageRanges(PoolBlocks(make_pool(layout, NUM_BLOCKS), layout), theirs=layout)
    orders = [
        RangeOrder(block_ids=[first, 9], token_start=0, token_end=8, timeout_s=5.0)
        for first in (3, 7)
    ]
    cuts: list[tuple[int, int]] = []
    cut = ranges._cutter.cut
    monkeypatch.setattr(
        ranges._cutter, "cut", lambda *range_: (cuts.append(range_), cut(*range_))[1]
    )
    ranges.prepare(orders[0])
    for order, num_cuts in zip(orders, (1, 2), strict=True):
        link = SilentLink()
        ranges.receive_range(link, order, alter=None, is_wanted=True)
        assert len(cuts) == num_cuts
        assert link.waited, "nothing was posted"
