"""A decode worker's KV plane in a process of its own, against a prefill side that listens here."""

import asyncio
import os
from contextlib import suppress
from multiprocessing.connection import Connection as ProcessConnection

import torch

from faults import plan
from kv_transfer.config import KVTransferConfig
from kv_transfer.control import PeerInfo, TransferFailedError, WorkerRef
from kv_transfer.link_dialer import LinkDialer
from kv_transfer.peer_link import LinkIdentity
from kv_transfer.receiver import KVReceiver, ReceiveOrder
from tests.integration.kv_transfer.wire import TcpLinkControl, TcpTransferControl
from tests.unit.kv_transfer.fakes import CPU, Reservation, eventually, make_layout, make_pool


async def receive(options: dict, parent: ProcessConnection) -> None:
    """Link, say so, receive what the parent names, and tell how that ended."""
    worker = WorkerRef("decode-0", options["incarnation"])
    config = KVTransferConfig(**options["config"])
    layout = make_layout(**options["layout"])
    pool = make_pool(layout, options["num_blocks"])
    port = options["port"]
    dialer = LinkDialer(
        LinkIdentity(worker=worker, layout=layout, device=CPU),
        config=config,
        connect=lambda peer: TcpLinkControl(port),
    )
    receiver = KVReceiver(
        pool, layout=layout, worker=worker, config=config, end_quarantine=lambda block_ids: None
    )
    peer = PeerInfo(worker=WorkerRef(*options["prefill_worker"]), address="here")
    dialer.set_peers("ingress", [peer])
    await eventually(lambda: dialer.link_for(peer.worker.worker_id), 20.0)
    parent.send(os.getpid())

    async def reserve() -> Reservation:
        return Reservation(list(range(options["num_blocks"])))

    while (transfer_id := await asyncio.to_thread(parent.recv)) is not None:
        link = dialer.link_for(peer.worker.worker_id)
        order = ReceiveOrder(
            transfer_id=transfer_id, epoch=1, link=link, num_tokens=options["num_tokens"]
        )
        try:
            await receiver.receive(order, TcpTransferControl(port), reserve, lambda in_flight: None)
        except TransferFailedError as error:
            parent.send(str(error.reason))
        else:
            parent.send("received")
    await dialer.close()
    await receiver.close()


def run(options: dict, faults: list[dict], parent: ProcessConnection) -> None:
    """A child's whole life."""
    plan._PLAN = plan.FaultPlan([plan.Fault(**{"match": {}, **fault}) for fault in faults], None)
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):
        asyncio.run(receive(options, parent))
    os._exit(0)
