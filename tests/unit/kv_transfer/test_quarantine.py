"""Who owns what a peer may still read: the real sender and block pool, any order of ends."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool, BlockState
from kv_transfer.config import KVTransferConfig
from kv_transfer.control import FetchOrder, FetchVerdict
from kv_transfer.moved_range import MovedRange
from kv_transfer.sender import KVSender
from kv_transfer.sender_state import SenderOrder
from kv_transfer.tickets import TicketCheck
from tests.unit.kv_transfer.fakes import DECODE, make_layout, make_pool

NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS = 24, 4, 14


@dataclass
class Reading:
    """A granted copy the peer has not answered for."""

    block_ids: list[int]
    done: "asyncio.Future[MovedRange]"


MOVED = MovedRange(
    token_start=0,
    token_end=1,
    backend="shared_memory",
    num_bytes=1,
    num_blocks=1,
    ticket_wait_s=0.0,
    started_at=0.0,
    ended_at=0.0,
)


class LendingLink:
    """A shared memory link whose peer answers when the test says so."""

    is_read_by_peer = True

    def __init__(self) -> None:
        self.granted: list[asyncio.Future[MovedRange]] = []

    def check(self, order: FetchOrder) -> TicketCheck:
        return TicketCheck.NEXT

    def grant(self, order, job, reply) -> "asyncio.Future[MovedRange]":
        self.granted.append(asyncio.get_running_loop().create_future())
        return self.granted[-1]


@dataclass
class World:
    """A prefill worker's books: requests own blocks, some of which a peer reads."""

    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    link: LendingLink = field(default_factory=LendingLink)
    blocks: dict[int, list[int]] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    num_started: int = 0

    def __post_init__(self) -> None:
        layout = make_layout(BLOCK_SIZE)
        self.sender = KVSender(
            make_pool(layout, NUM_BLOCKS),
            layout=layout,
            config=KVTransferConfig(),
            acceptor=self,
            end_quarantine=self.pool.end_quarantine,
        )

    def link_for(self, decode_worker, generation) -> LendingLink:
        return self.link

    def start(self, _: int) -> None:
        num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
        if self.pool.num_available < num_blocks:
            return
        self.num_started += 1
        transfer_id = self.num_started
        self.blocks[transfer_id] = self.pool.allocate(num_blocks)
        order = SenderOrder(
            transfer_id=transfer_id, epoch=1, decode_worker=DECODE, num_tokens=NUM_TOKENS
        )
        self.sender.open(order, lambda still_read: self.let_go(transfer_id, still_read))
        self.sender.offer(transfer_id, NUM_TOKENS, self.blocks[transfer_id])

    def let_go(self, transfer_id: int, still_read) -> None:
        self.pool.quarantine(still_read)
        self.pool.free(self.blocks.pop(transfer_id))

    async def fetch(self, choice: int) -> None:
        if not self.blocks:
            return
        transfer_id = sorted(self.blocks)[choice % len(self.blocks)]
        start = choice % NUM_TOKENS
        end = min(start + 1 + choice % 9, NUM_TOKENS)
        order = FetchOrder(
            transfer_id=transfer_id,
            epoch=1,
            decode_worker=DECODE,
            generation=1,
            ticket=0,
            token_start=start,
            token_end=end,
        )
        block_ids = self.blocks[transfer_id][start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
        reply = await self.sender.fetch(order)
        assert reply.verdict is FetchVerdict.GRANTED
        assert reply.lent == tuple(block_ids), "the peer is sent where nothing waits for it"
        self.readings.append(Reading(block_ids, self.link.granted[-1]))

    def end(self, choice: int) -> None:
        if self.blocks:
            transfer_id = sorted(self.blocks)[choice % len(self.blocks)]
            ends: list[Callable[[], None]] = [
                lambda: self.sender.release(transfer_id, epoch=1),
                lambda: self.sender.cancel(transfer_id),
            ]
            ends[choice % 2]()
            assert transfer_id not in self.blocks, "a request waits for its peer"

    async def answer(self, choice: int) -> None:
        if self.readings:
            reading = self.readings.pop(choice % len(self.readings))
            if choice % 2:
                reading.done.set_result(MOVED)
            else:
                reading.done.set_exception(ConnectionError("the peer is gone"))
            await asyncio.sleep(0)

    def check(self) -> None:
        self.pool.check_integrity()
        owned = {block_id for block_ids in self.blocks.values() for block_id in block_ids}
        read = {block_id for reading in self.readings for block_id in reading.block_ids}
        states = [block.state for block in self.pool._blocks]
        for block_id, state in enumerate(states):
            if block_id in owned:
                assert state is BlockState.USED
            elif block_id in read:
                assert state is BlockState.QUARANTINED, "the peer reads what may be given away"
            else:
                assert state is BlockState.FREE, "a block outlives its last reader"


ACTIONS = st.tuples(
    st.sampled_from(["start", "fetch", "fetch", "end", "answer"]), st.integers(0, 1000)
)


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_a_block_is_given_away_only_when_nobody_reads_it(actions: list[tuple[str, int]]) -> None:
    async def run() -> None:
        world = World()
        for name, choice in actions:
            result = getattr(world, name)(choice)
            if asyncio.iscoroutine(result):
                await result
            world.check()
        while world.blocks:
            world.end(0)
        while world.readings:
            await world.answer(1)
        world.check()
        assert world.pool.counts().free == NUM_BLOCKS
        await world.sender.close()

    asyncio.run(run())
