"""A link between two processes of a bench; a pipe carries the rendezvous."""

import threading
from multiprocessing.connection import Connection

import torch

from kv_transfer.link import Link, LinkSpec
from kv_transfer.shared_memory_channel import SharedPool
from kv_transfer.store import RendezvousStore


def build_link(
    rendezvous: Connection,
    *,
    is_sender: bool,
    backend: str,
    timeout_s: float,
    shared_pool: SharedPool | None = None,
) -> Link:
    """Return this process's end, built and probed; the other process calls it, too."""
    store = RendezvousStore(lambda key, value: rendezvous.send((key, value)), timeout_s=timeout_s)
    threading.Thread(target=_deliver, args=(rendezvous, store), daemon=True).start()
    spec = LinkSpec(
        link_id="bench",
        is_sender=is_sender,
        backend=backend,
        timeout_s=timeout_s,
        device=torch.device("cpu"),
        shared_pool=shared_pool,
    )
    link = Link(spec, store)
    link.build()
    link.probe()
    return link


def _deliver(rendezvous: Connection, store: RendezvousStore) -> None:
    try:
        while True:
            store.deliver(*rendezvous.recv())
    except (EOFError, OSError):
        return
