"""Sender and receiver together, over a fake wire."""

import asyncio
import gc
import random
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from kv_transfer.backend import LinkBrokenError
from kv_transfer.config import KVTransferConfig
from kv_transfer.control import (
    Commit,
    CommitChoice,
    FailureReason,
    FetchOrder,
    FetchVerdict,
    Offer,
    StaleLinkError,
    TransferFailedError,
    TransferNotFoundError,
    WorkerRef,
)
from kv_transfer.pool_blocks import PoolBlocks
from kv_transfer.receiver import ReceiveOrder
from kv_transfer.sender_state import SenderOrder
from tests.unit.kv_transfer.fakes import (
    DECODE,
    HASTY,
    PATIENT,
    PREFILL,
    Pair,
    Reservation,
    eventually,
    tokens_of,
)


def commit_of(num_tokens: int, finish_reason: str = "") -> Commit:
    return Commit(
        num_tokens=num_tokens, choices=(CommitChoice(token_id=7, finish_reason=finish_reason),)
    )


@pytest.fixture
async def pair(request):
    """Marked with its settings where they are not the patient ones."""
    pair = Pair(**getattr(request, "param", {}))
    await pair.link_up()
    yield pair
    await pair.close()
    assert pair.sender.num_open == 0
    assert pair.receiver.num_active == 0
    assert pair.receiver.num_promised_tokens == 0


soon_over = pytest.mark.parametrize("pair", [{"config": HASTY}], ids=["hasty"], indirect=True)


def blocks_for(num_tokens: int, block_size: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(64), -(-num_tokens // block_size))


async def hand_over(
    pair: Pair, num_tokens: int, *, transfer_id: int = 1, num_cached: int = 0, chunk: int = 10
):
    source = blocks_for(num_tokens, pair.p_layout.block_size, transfer_id)
    num_blocks = pair.d_layout.num_blocks(num_tokens + 1)
    target, pair.free_blocks = pair.free_blocks[:num_blocks], pair.free_blocks[num_blocks:]
    pair.open(transfer_id, num_tokens)

    async def reserve():
        return Reservation(target, num_cached)

    receiving = asyncio.create_task(
        pair.receiver.receive(
            ReceiveOrder(transfer_id=transfer_id, epoch=1, link=pair.link, num_tokens=num_tokens),
            pair.control,
            reserve,
            pair.given_up.extend,
        )
    )
    for done in [*range(chunk, num_tokens, chunk), num_tokens]:
        pair.sender.offer(transfer_id, done, source[: pair.p_layout.num_blocks(done)])
        await asyncio.sleep(0)
    pair.sender.commit(transfer_id, commit_of(num_tokens))
    received = await receiving
    return received, source, target


async def test_tokens_count_as_promised_until_they_have_blocks(pair: Pair) -> None:
    room = asyncio.Event()

    async def reserve():
        await room.wait()
        return Reservation(pair.free_blocks[:6], 0)

    pair.open(1, 20)
    receiving = asyncio.create_task(
        pair.receiver.receive(
            ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=20),
            pair.control,
            reserve,
            pair.given_up.extend,
        )
    )
    pair.sender.offer(1, 20, blocks_for(20, pair.p_layout.block_size, 1))
    pair.sender.commit(1, commit_of(20))
    await eventually(lambda: pair.receiver.num_active == 1)
    assert pair.receiver.num_promised_tokens == 20
    room.set()
    await receiving
    assert pair.receiver.num_promised_tokens == 0


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 23, 64])
@pytest.mark.parametrize(("p_block", "d_block"), [(4, 4), (4, 8), (8, 4), (3, 8)])
async def test_every_token_arrives(num_tokens: int, p_block: int, d_block: int) -> None:
    pair = Pair(prefill_block=p_block, decode_block=d_block)
    await pair.link_up()
    received, source, target = await hand_over(pair, num_tokens)
    assert received.commit.choices[0].token_id == 7
    sent = tokens_of(pair.p_pool, source, num_tokens)
    assert torch.equal(sent, tokens_of(pair.d_pool, target, num_tokens))
    await pair.close()
    assert pair.given_back == [1]


async def test_blocks_outside_the_reservation_stay_as_they_are(pair: Pair) -> None:
    pair.d_pool.fill_(5.0)
    _, _, target = await hand_over(pair, 23)
    others = [block for block in range(64) if block not in target]
    assert bool((pair.d_pool[others] == 5.0).all())


async def test_cached_prefix_does_not_travel(pair: Pair) -> None:
    received, source, target = await hand_over(pair, 23, num_cached=8)
    assert min(order.token_start for order in pair.control.fetches) == 8
    assert received.num_cached_tokens == 8
    assert not bool(pair.d_pool[target[:2]].any())
    sent = tokens_of(pair.p_pool, source, 23)[8:]
    assert torch.equal(sent, tokens_of(pair.d_pool, target, 23)[8:])


async def test_what_has_to_be_gathered_of_a_prompt_is_before_it_is_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, num_fetches = PoolBlocks.gather, []

    def note(*args: object, **options: object) -> None:
        num_fetches.append(len(pair.control.fetches))
        gather(*args, **options)

    monkeypatch.setattr(PoolBlocks, "gather", note)
    monkeypatch.setattr("kv_transfer.message_ranges.PIECE_BYTES", pair.p_layout.bytes_per_block)
    _, source, target = await hand_over(pair, 21, chunk=21)
    assert num_fetches == [0]
    assert torch.equal(tokens_of(pair.p_pool, source, 21), tokens_of(pair.d_pool, target, 21))


async def test_everything_cached_waits_for_the_commit_only(pair: Pair) -> None:
    received, _, _ = await hand_over(pair, 16, num_cached=16)
    assert received.num_bytes == 0
    assert pair.control.fetches == []


async def test_a_finished_commit_transfers_nothing(pair: Pair) -> None:
    pair.open(1, 9)

    async def reserve():
        raise AssertionError("nothing to reserve for")

    pair.sender.offer(1, 9, [1, 2, 3])
    pair.sender.commit(1, commit_of(9, "stop"))
    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=9)
    received = await pair.receiver.receive(order, pair.control, reserve, pair.given_up.extend)
    assert received.commit.choices[0].finish_reason == "stop"
    assert received.num_bytes == 0


async def test_lost_requests_and_replies_are_asked_again(pair: Pair) -> None:
    pair.control.before_fetch = [OSError("lost")]
    pair.control.after_fetch = [OSError("lost"), OSError("lost")]
    _, source, target = await hand_over(pair, 23)
    assert torch.equal(tokens_of(pair.p_pool, source, 23), tokens_of(pair.d_pool, target, 23))
    assert pair.link.generation == 1
    assert pair.sender.counters.fenced_messages == 0


async def test_many_transfers_share_a_link(pair: Pair) -> None:
    await asyncio.gather(*(hand_over(pair, 20, transfer_id=n) for n in range(1, 9)))
    await eventually(lambda: sorted(pair.given_back) == list(range(1, 9)))
    assert pair.link.is_idle


async def test_cancel_gives_back_both_sides(pair: Pair) -> None:
    pair.open(1, 40)
    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=40)

    async def reserve():
        return Reservation(list(range(11)))

    receiving = asyncio.create_task(
        pair.receiver.receive(order, pair.control, reserve, pair.given_up.extend)
    )
    pair.sender.offer(1, 20, list(range(5)))
    await eventually(lambda: pair.control.fetches)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    before = pair.d_pool.clone()
    await eventually(lambda: pair.given_back == [1] and pair.link.is_idle)
    assert torch.equal(before, pair.d_pool)
    assert pair.receiver.counters.failures == {FailureReason.CANCELLED: 1}
    _, source, target = await hand_over(pair, 23, transfer_id=2)
    assert torch.equal(tokens_of(pair.p_pool, source, 23), tokens_of(pair.d_pool, target, 23))
    assert pair.link.generation == 1


async def test_router_cancel_is_gone_for_the_decode_side(pair: Pair) -> None:
    pair.open(1, 40)
    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=40)

    async def reserve():
        return Reservation(list(range(11)))

    receiving = asyncio.create_task(
        pair.receiver.receive(order, pair.control, reserve, pair.given_up.extend)
    )
    await asyncio.sleep(0.01)
    pair.sender.cancel(1)
    assert pair.given_back == [1]
    with pytest.raises(TransferFailedError) as failure:
        await receiving
    assert failure.value.reason is FailureReason.GONE
    with pytest.raises(TransferNotFoundError):
        await anext(pair.sender.watch(1, epoch=1, decode_worker=DECODE))


async def test_unknown_transfer_is_not_found_after_a_while() -> None:
    pair = Pair(config=KVTransferConfig(transfer_timeout_s=0.05))
    with pytest.raises(TransferNotFoundError):
        await anext(pair.sender.watch(5, epoch=1, decode_worker=DECODE))


async def test_watch_waits_for_the_transfer_to_open(pair: Pair) -> None:
    stream = pair.sender.watch(3, epoch=1, decode_worker=DECODE)
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    pair.open(3, 8)
    pair.sender.offer(3, 4, [0])
    assert await first == Offer(4)
    await stream.aclose()
    pair.sender.cancel(3)


async def test_release_before_open_closes_at_once(pair: Pair) -> None:
    pair.sender.release(4, epoch=1)
    pair.open(4, 8)
    assert pair.given_back == [4]


@soon_over
async def test_lease_runs_out_without_a_follower(pair: Pair) -> None:
    pair.open(1, 4)
    pair.sender.offer(1, 4, [0])
    pair.sender.commit(1, commit_of(4))
    await eventually(lambda: pair.given_back == [1])
    assert pair.sender.counters.leases_expired == 1


@pytest.mark.parametrize("pair", [{"config": replace(PATIENT, lease_s=1.0)}], indirect=True)
async def test_a_decode_worker_that_waits_for_room_keeps_the_lease(pair: Pair) -> None:
    pair.open(1, 4)
    pair.sender.offer(1, 4, [0])
    pair.sender.commit(1, commit_of(4))

    async def reserve():
        # Three renewals are one lease.
        await eventually(lambda: pair.control.num_watches > 4)
        return Reservation([1, 2])

    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=4)
    received = await pair.receiver.receive(order, pair.control, reserve, pair.given_up.extend)
    assert received.commit.choices[0].token_id == 7
    assert pair.sender.counters.leases_expired == 0


@soon_over
async def test_a_stream_that_is_merely_open_does_not_keep_the_lease(pair: Pair) -> None:
    """As that of a frozen decode worker."""
    pair.open(1, 4)
    stream = pair.sender.watch(1, epoch=1, decode_worker=DECODE)
    pair.sender.offer(1, 4, [0])
    pair.sender.commit(1, commit_of(4))
    assert isinstance(await anext(stream), Commit)
    assert await asyncio.wait_for(anext(stream, None), 20.0) is None
    assert pair.given_back == [1]
    assert pair.sender.counters.leases_expired == 1


async def test_old_epochs_and_other_workers_change_nothing(pair: Pair) -> None:
    pair.open(1, 8, epoch=2)
    pair.sender.offer(1, 8, [0, 1])
    pair.sender.release(1, epoch=1)
    assert pair.given_back == []
    with pytest.raises(TransferNotFoundError):
        await anext(pair.sender.watch(1, epoch=1, decode_worker=DECODE))
    fields = {"transfer_id": 1, "ticket": 0, "token_start": 0, "token_end": 4}
    old_epoch = FetchOrder(epoch=1, decode_worker=DECODE, generation=1, **fields)
    old_link = FetchOrder(epoch=2, decode_worker=DECODE, generation=9, **fields)
    stranger = FetchOrder(epoch=2, decode_worker=WorkerRef("decode-0", 1), generation=1, **fields)
    assert (await pair.sender.fetch(old_epoch)).verdict is FetchVerdict.GONE
    for order in (old_link, stranger):
        with pytest.raises(StaleLinkError):
            await pair.sender.fetch(order)
    assert pair.sender.counters.fenced_messages == 5
    assert pair.link.is_usable
    pair.sender.cancel(1)


async def test_wrong_bytes_fail_the_transfer(pair: Pair, monkeypatch) -> None:
    def corrupt_once(point, link, *, request_label):
        return (lambda message: message[:8].bitwise_xor_(0xFF)) if point == "kv_send" else None

    monkeypatch.setattr("kv_transfer.range_sender.ask_fault_plan", corrupt_once)
    with pytest.raises(TransferFailedError) as failure:
        await hand_over(pair, 23)
    assert failure.value.reason is FailureReason.DIGEST_MISMATCH
    assert pair.receiver.counters.digest_mismatches == 1
    # the bytes were wrong, not their order: the link goes on
    assert pair.link.is_usable
    pair.sender.cancel(1)


async def test_a_fault_in_one_operation_costs_that_link_only(pair: Pair, monkeypatch) -> None:
    def fail_once(point, link, *, request_label):
        monkeypatch.undo()
        raise RuntimeError("boom")

    monkeypatch.setattr("kv_transfer.range_sender.ask_fault_plan", fail_once)
    with pytest.raises(TransferFailedError) as failure:
        await hand_over(pair, 23)
    assert failure.value.reason is FailureReason.LINK_BROKEN
    await pair.link_up()
    assert pair.link.generation == 2
    _, source, target = await hand_over(pair, 23, transfer_id=2)
    assert torch.equal(tokens_of(pair.p_pool, source, 23), tokens_of(pair.d_pool, target, 23))


@soon_over
async def test_a_peer_that_never_answers_costs_one_deadline(pair: Pair) -> None:
    class Silent:
        def __getattr__(self, name):
            return getattr(pair.control, name)

        async def fetch(self, order):
            await asyncio.sleep(60)

    pair.open(1, 4)
    pair.sender.offer(1, 4, [0])

    async def reserve():
        return Reservation([1, 2])

    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=4)
    async with asyncio.timeout(20.0):
        with pytest.raises(TransferFailedError) as failure:
            await pair.receiver.receive(order, Silent(), reserve, pair.given_up.extend)
    assert failure.value.reason is FailureReason.TIMEOUT


async def test_no_room_is_bounded_by_the_order(pair: Pair) -> None:
    pair.open(1, 4)
    pair.sender.offer(1, 4, [0])
    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=4, timeout_s=0.1)
    with pytest.raises(TransferFailedError) as failure:
        await pair.receiver.receive(order, pair.control, asyncio.Event().wait, pair.given_up.extend)
    assert failure.value.reason is FailureReason.NO_ROOM


async def test_an_error_of_the_reservation_reaches_the_caller(pair: Pair) -> None:
    pair.open(1, 4)
    pair.sender.offer(1, 4, [0])

    async def reserve():
        raise ValueError("never fits")

    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=4)
    with pytest.raises(ValueError, match="never fits"):
        await pair.receiver.receive(order, pair.control, reserve, pair.given_up.extend)


async def test_blocks_wait_for_granted_sends() -> None:
    pair = Pair(config=HASTY)
    await pair.link_up()
    pair.open(1, 4)
    pair.sender.offer(1, 4, [0])
    order = FetchOrder(
        transfer_id=1,
        epoch=1,
        decode_worker=DECODE,
        generation=1,
        ticket=0,
        token_start=0,
        token_end=4,
    )
    # granted, but the decode side never posts its half
    assert (await pair.sender.fetch(order)).verdict is FetchVerdict.GRANTED
    pair.sender.release(1, epoch=1)
    assert pair.given_back == []
    await eventually(lambda: pair.given_back == [1])
    await pair.close()


async def test_opening_an_id_twice_is_refused(pair: Pair) -> None:
    pair.open(1, 4)
    with pytest.raises(ValueError, match="transfer_id"):
        pair.sender.open(
            SenderOrder(transfer_id=1, epoch=2, decode_worker=DECODE, num_tokens=4),
            lambda still_read: None,
        )
    pair.sender.cancel(1)


async def test_buffers_of_a_link_end_with_it_and_wait_for_no_collector() -> None:
    pair = Pair()
    await pair.link_up()
    await hand_over(pair, 21)
    ends = pair.link.live, pair.acceptor.link_for(DECODE, 1).live
    movers = [weakref.ref(end._mover) for end in ends]
    gc.disable()
    try:
        await pair.close()
        assert [mover() for mover in movers] == [None, None]
    finally:
        gc.enable()


async def test_no_threads_stay_behind() -> None:
    pair = Pair()
    await pair.link_up()
    await hand_over(pair, 23)
    assert any(thread.name.startswith("kv-") for thread in threading.enumerate())
    assert pair.dialer.statuses()[0].state == "ready"
    assert pair.acceptor.statuses()[0].peer_id == DECODE.worker_id
    assert pair.dialer.statuses()[0].peer_id == PREFILL.worker_id
    await pair.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-")]


async def test_what_is_queued_behind_a_failed_operation_posts_nothing(pair: Pair) -> None:
    """The peer has posted the failed one's half: the next one's would meet it."""
    live, posted = pair.link.live, []

    def fail(_link):
        raise RuntimeError("before it posted anything")

    def post(link):
        posted.append(link.receive(torch.empty(8, dtype=torch.uint8)))

    results = await asyncio.gather(live.run(fail), live.run(post), return_exceptions=True)
    assert [type(each) for each in results] == [RuntimeError, LinkBrokenError]
    assert posted == []


async def test_a_release_that_is_not_heard_is_said_again(pair: Pair) -> None:
    pair.control.before_release = [OSError("lost"), OSError("lost")]
    await hand_over(pair, 23)
    assert pair.given_back == []
    await eventually(lambda: pair.given_back == [1])
    assert pair.sender.counters.leases_expired == 0


async def test_closing_does_not_wait_for_a_peer_that_is_gone(pair: Pair) -> None:
    pair.control.before_release = [OSError("gone")] * 9
    await hand_over(pair, 23)
    async with asyncio.timeout(pair.config.lease_s / 2):
        await pair.receiver.close()
    pair.sender.cancel(1)


async def test_a_commit_that_ends_the_request_leaves_what_travels_in_quarantine(
    pair: Pair,
) -> None:
    """The prefill side has not posted its half yet, so the receive is under way."""
    pair.open(1, 9)
    pair.sender.offer(1, 8, [1, 2, 3])
    posting = asyncio.Event()
    run = pair.acceptor.link_for(DECODE, 1).live.run

    def run_later(job):
        async def wait():
            await posting.wait()
            return await run(job)

        return asyncio.ensure_future(wait())

    pair.acceptor.link_for(DECODE, 1).live.run = run_later

    async def reserve():
        return Reservation([5, 6, 7])

    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=9)
    receiving = asyncio.create_task(
        pair.receiver.receive(order, pair.control, reserve, pair.given_up.extend)
    )
    await eventually(lambda: pair.wires.by_id and next(iter(pair.wires.by_id.values())).receives)
    pair.sender.offer(1, 9, [1, 2, 3])
    pair.sender.commit(1, commit_of(9, "stop"))
    await receiving
    assert pair.given_up == [5, 6]
    assert pair.d_quarantine_ended == []
    posting.set()
    await eventually(lambda: pair.d_quarantine_ended == [5, 6])


async def test_a_cancel_after_the_last_range_gives_back_what_had_arrived(pair: Pair) -> None:
    class SlowToClose:
        def __getattr__(self, name):
            return getattr(pair.control, name)

        async def watch(self, *args, **kwargs):
            try:
                async for message in pair.control.watch(*args, **kwargs):
                    yield message
            finally:
                closing.set()
                await asyncio.sleep(0.05)

    closing, given_back = asyncio.Event(), []
    pair.open(1, 8)
    pair.sender.offer(1, 8, [0, 1])
    pair.sender.commit(1, commit_of(8))

    async def reserve():
        return Reservation([5, 6])

    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=8)
    receiving = asyncio.create_task(
        pair.receiver.receive(order, SlowToClose(), reserve, given_back.append)
    )
    await closing.wait()
    assert given_back == []
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert [list(each) for each in given_back] == [[]]


async def test_a_cancel_between_the_last_news_and_its_taker_gives_everything_back(
    pair: Pair,
) -> None:
    class CancelsWithTheCommit:
        def __getattr__(self, name):
            return getattr(pair.control, name)

        async def watch(self, *args, **kwargs):
            async for message in pair.control.watch(*args, **kwargs):
                yield message
                if isinstance(message, Commit):
                    receiving.cancel()

    given_back = []
    reserved = asyncio.Event()
    pair.open(1, 8)
    pair.sender.offer(1, 8, [0, 1])

    async def reserve():
        reserved.set()
        return Reservation([5, 6], 8)

    order = ReceiveOrder(transfer_id=1, epoch=1, link=pair.link, num_tokens=8)
    receiving = asyncio.create_task(
        pair.receiver.receive(order, CancelsWithTheCommit(), reserve, given_back.append)
    )
    await reserved.wait()
    await asyncio.sleep(0.01)
    pair.sender.commit(1, commit_of(8))
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert [list(each) for each in given_back] == [[]]
