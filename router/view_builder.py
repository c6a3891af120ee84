"""Turns what a worker said on its state stream into the frozen data the policy sees."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from relevo.v1 import state_pb2

from engine.block_hash import BlockHash
from router.typical_rates import StepCost, TypicalRates
from router.worker_view import LinkView, Pending, WorkerKey, WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the router itself thinks of a worker."""

    is_routable: bool
    has_refused: bool
    pending: Pending
    distrusted_links: Collection[WorkerKey]


def learn_rates(rates: TypicalRates, key: WorkerKey, pool: str, load: state_pb2.WorkerLoad) -> None:
    """Let the others know how fast this worker is."""
    step_cost = StepCost(load.request_s, load.kv_token_s)
    rates.learn(key, pool, load.prefill_tokens_per_s, load.rates_age_s, step_cost)


def facts_of(
    hello: state_pb2.WatchStateResponse.Hello,
    load: state_pb2.WorkerLoad | None,
    rates: TypicalRates,
) -> dict[str, Any]:
    """What the worker told, by the names of a view's fields; it stays until the next message."""
    return {
        "key": WorkerKey(hello.worker.worker_id, hello.worker.incarnation),
        "pool": hello.pool,
        "max_num_seqs": hello.max_num_seqs,
        "max_model_len": hello.max_model_len,
        "max_num_batched_tokens": hello.max_num_batched_tokens,
        "block_size": max(hello.layout.block_size, 1),
        "hash_root": BlockHash(hello.hash_root),
        "num_kv_blocks": hello.num_kv_blocks,
        "kv_bytes_per_token": hello.kv_bytes_per_token,
        **({} if load is None else _facts_of_load(hello.pool, load, rates)),
    }


def build_view(facts: Mapping[str, Any], standing: Standing) -> WorkerView:
    """One view of this moment."""
    view = WorkerView(
        **facts,
        is_routable=standing.is_routable,
        has_refused=standing.has_refused,
        pending=standing.pending,
    )
    if not standing.distrusted_links:
        return view
    links = {k: link for k, link in view.links.items() if k not in standing.distrusted_links}
    return replace(view, links=links)


def _facts_of_load(pool: str, load: state_pb2.WorkerLoad, rates: TypicalRates) -> dict[str, Any]:
    step_cost = rates.step_cost(pool, StepCost(load.request_s, load.kv_token_s))
    return {
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_transferring": load.num_transferring,
        "num_promised_tokens": load.num_promised_tokens,
        "num_waiting_uncached_tokens": load.num_waiting_uncached_tokens,
        "num_free_blocks": load.blocks.free + load.blocks.cached,
        "num_used_blocks": load.blocks.used,
        "prefill_tokens_per_s": rates.current(pool, load.prefill_tokens_per_s, load.rates_age_s),
        "step_s": load.step_s,
        "request_s": step_cost.request_s,
        "kv_token_s": step_cost.kv_token_s,
        "links": {_peer_of(link): _view_link(link) for link in load.links if link.state == "ready"},
    }


def _peer_of(link: state_pb2.LinkStatus) -> WorkerKey:
    return WorkerKey(link.peer_id, link.peer_incarnation)


def _view_link(link: state_pb2.LinkStatus) -> LinkView:
    return LinkView(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_s=link.latency_s,
        queued_bytes=link.queued_bytes,
    )
