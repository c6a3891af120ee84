"""Turns what a worker said on its state stream into the frozen data the policy sees."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from relevo.v1 import state_pb2

from engine.block_hash import BlockHash
from router.worker_view import LinkView, Pending, WorkerKey, WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the router itself thinks of a worker."""

    is_routable: bool
    has_refused: bool
    pending: Pending
    distrusted_links: Collection[WorkerKey]


def build_view(
    hello: state_pb2.WatchStateResponse.Hello,
    load: state_pb2.WorkerLoad | None,
    standing: Standing,
) -> WorkerView:
    """One view of this moment."""
    view = WorkerView(
        key=WorkerKey(hello.worker.worker_id, hello.worker.incarnation),
        pool=hello.pool,
        is_routable=standing.is_routable,
        has_refused=standing.has_refused,
        max_num_seqs=hello.max_num_seqs,
        max_model_len=hello.max_model_len,
        max_num_batched_tokens=hello.max_num_batched_tokens,
        block_size=max(hello.layout.block_size, 1),
        hash_root=BlockHash(hello.hash_root),
        num_kv_blocks=hello.num_kv_blocks,
        kv_bytes_per_token=hello.kv_bytes_per_token,
        pending=standing.pending,
    )
    return view if load is None else _with_load(view, load, standing.distrusted_links)


def _with_load(
    view: WorkerView, load: state_pb2.WorkerLoad, distrusted_links: Collection[WorkerKey]
) -> WorkerView:
    links = {_peer_of(link): _view_link(link) for link in load.links if link.state == "ready"}
    for peer in distrusted_links:
        links.pop(peer, None)
    return replace(
        view,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_transferring=load.num_transferring,
        num_waiting_uncached_tokens=load.num_waiting_uncached_tokens,
        num_free_blocks=load.blocks.free + load.blocks.cached,
        num_used_blocks=load.blocks.used,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        step_s=load.step_s,
        links=links,
    )


def _peer_of(link: state_pb2.LinkStatus) -> WorkerKey:
    return WorkerKey(link.peer_id, link.peer_incarnation)


def _view_link(link: state_pb2.LinkStatus) -> LinkView:
    return LinkView(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_s=link.latency_s,
        queued_bytes=link.queued_bytes,
    )
