"""A prefill worker's KV plane in a process of its own."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection as ProcessConnection

import psutil
import torch

from engine.shared_memory import SharedMemory
from faults import plan
from kv_transfer.config import KVTransferConfig
from kv_transfer.control import (
    Commit,
    CommitChoice,
    StaleLinkError,
    TransferNotFoundError,
    WorkerRef,
)
from kv_transfer.link_acceptor import LinkAcceptor
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.sender import KVSender
from kv_transfer.sender_state import SenderOrder
from kv_transfer.shared_memory_channel import SharedPool
from tests.integration.kv_transfer.wire import Connection
from tests.unit.kv_transfer.fakes import make_layout, make_pool


class PrefillProcess:
    def __init__(self, options: dict) -> None:
        self.worker = WorkerRef(options["worker_id"], time.time_ns() // 1000)
        self.config = KVTransferConfig(**options["config"])
        self.layout = make_layout(**options["layout"])
        pool = make_pool(self.layout, options["num_blocks"], seed=options["seed"])
        self.memory = SharedMemory(pool.numel() * pool.element_size())
        self.pool = self.memory.tensor(tuple(pool.shape), pool.dtype).copy_(pool)
        identity = LinkIdentity(
            worker=self.worker,
            layout=self.layout,
            device=torch.device("cpu"),
            shared_pool=SharedPool(self.memory.descriptor, self.memory.num_bytes),
        )
        self.acceptor = LinkAcceptor(identity, config=self.config)
        self.sender = KVSender(
            self.pool,
            layout=self.layout,
            config=self.config,
            acceptor=self.acceptor,
            end_quarantine=self.end_quarantine,
        )
        self.given_back: list[int] = []
        # how often each block is kept from reuse because a peer may still read it
        self.quarantined: Counter[int] = Counter()
        self.prefills: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            kind, *rest = await connection.receive()
            await getattr(self, f"on_{kind}")(connection, *rest)
        finally:
            await connection.close()

    async def on_link(self, connection: Connection) -> None:
        try:
            await self.acceptor.serve(await connection.receive(), connection)
        except StaleLinkError:
            return

    def give_back(self, transfer_id: int, still_read: Sequence[int]) -> None:
        self.given_back.append(transfer_id)
        self.quarantined.update(still_read)

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        self.quarantined.subtract(block_ids)
        assert min(self.quarantined.values()) >= 0
        self.quarantined += Counter()

    async def on_watch(
        self, connection: Connection, transfer_id: int, epoch: int, decode_worker: WorkerRef
    ) -> None:
        stream = self.sender.watch(transfer_id, epoch=epoch, decode_worker=decode_worker)
        relay = asyncio.create_task(self.relay(stream, connection))
        hangup = asyncio.create_task(connection.reader.read())
        await asyncio.wait({relay, hangup}, return_when=asyncio.FIRST_COMPLETED)
        for task in (relay, hangup):
            task.cancel()
        await asyncio.gather(relay, hangup, return_exceptions=True)

    async def relay(self, stream, connection: Connection) -> None:
        try:
            async for message in stream:
                await connection.send(message)
            await connection.send(None)
        except TransferNotFoundError as error:
            await connection.send(error)
        finally:
            await stream.aclose()

    async def on_fetch(self, connection: Connection, order) -> None:
        try:
            await connection.send(await self.sender.fetch(order))
        except StaleLinkError as error:
            await connection.send(error)

    async def on_release(self, connection: Connection, transfer_id: int, epoch: int) -> None:
        self.sender.release(transfer_id, epoch=epoch)
        await connection.send(None)

    async def on_prefill(self, connection: Connection, request: dict) -> None:
        task = asyncio.create_task(self.prefill(**request))
        self.prefills.add(task)
        task.add_done_callback(self.prefills.discard)
        await connection.send(None)

    async def prefill(
        self, transfer_id, decode_worker, block_ids, num_tokens, chunk, delay_s
    ) -> None:
        self.sender.open(
            SenderOrder(
                transfer_id=transfer_id,
                epoch=1,
                decode_worker=decode_worker,
                num_tokens=num_tokens,
            ),
            partial(self.give_back, transfer_id),
        )
        for done in [*range(chunk, num_tokens, chunk), num_tokens]:
            self.sender.offer(transfer_id, done, block_ids)
            await asyncio.sleep(delay_s)
        self.sender.commit(
            transfer_id,
            Commit(num_tokens=num_tokens, choices=(CommitChoice(token_id=transfer_id),)),
        )

    async def on_cancel(self, connection: Connection, transfer_id: int) -> None:
        self.sender.cancel(transfer_id)
        await connection.send(None)

    async def on_report(self, connection: Connection) -> None:
        me = psutil.Process()
        await connection.send(
            {
                "given_back": self.given_back,
                "num_open": self.sender.num_open,
                "leases_expired": self.sender.counters.leases_expired,
                "quarantined": sorted(self.quarantined),
                "num_links": len(self.acceptor.statuses()),
                "threads": me.num_threads(),
                "fds": me.num_fds(),
                "listeners": [
                    c.laddr.ip for c in me.net_connections("inet") if c.status == "LISTEN"
                ],
            }
        )


async def serve(options: dict, parent: ProcessConnection) -> None:
    process = PrefillProcess(options)
    server = await asyncio.start_server(process.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    parent.send({"port": port, "incarnation": process.worker.incarnation, "pid": os.getpid()})
    # ends with its parent: the pipe closes
    with suppress(EOFError):
        await asyncio.to_thread(parent.recv)
    os._exit(0)


def run(options: dict, faults: list[dict], parent: ProcessConnection) -> None:
    """A child's whole life; torch was imported by whoever forked it."""
    plan._PLAN = plan.FaultPlan([plan.Fault(**{"match": {}, **fault}) for fault in faults], None)
    torch.set_num_threads(1)
    asyncio.run(serve(options, parent))
