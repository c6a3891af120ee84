"""The body of /v1/status."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from relevo.v1 import state_pb2

from kv_transfer.place import Place
from router.dispatcher import PastRoute
from router.policy import ScoredChoice
from router.worker_state import WorkerState
from router.worker_view import DECODE, PREFILL
from router.workers import LOST_SHOWN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether a choice exists, and whether one ever did."""

    is_ready: bool
    has_been_ready: bool


def build_status(
    workers: Iterable[WorkerState], readiness: Readiness, *, now_s: float
) -> dict[str, object]:
    """State of the whole as this router sees it, and of each worker."""
    shown = sorted(
        (each for each in workers if each.lost_at_s is None or _is_fresh(each, now_s)),
        key=lambda each: (each.description.pool, each.key),
    )
    places = {each.key.worker_id: _place(each) for each in shown}
    reasons = [reason for worker in shown for reason in _reasons(worker)]
    reasons += _missing_links([worker for worker in shown if worker.state == "ready"])
    if readiness.is_ready:
        state = "degraded" if reasons else "ready"
    else:
        state = "unavailable" if readiness.has_been_ready else "starting"
        reasons.insert(0, "no choice of workers exists")
    return {
        "state": state,
        "reasons": reasons,
        "workers": [_describe(worker, places, now_s) for worker in shown],
    }


def describe_routes(routes: Sequence[PastRoute], *, now_s: float) -> list[dict[str, object]]:
    """Decisions with their cost terms, the newest last."""
    return [
        {
            "request_id": past.request_id,
            "attempt": past.epoch,
            "age_s": now_s - past.route.chosen_at_s,
            "waited_s": past.route.waited_s,
            "num_choices": past.route.decision.num_choices,
            "predicted_cached_tokens": past.route.num_predicted_tokens,
            "chosen": _describe_choice(past.route.decision.chosen),
            "next_best": _describe_choice(past.route.decision.next_best),
        }
        for past in routes
    ]


def _describe_choice(scored: ScoredChoice | None) -> dict[str, object] | None:
    if scored is None:
        return None
    prefill = scored.choice.prefill
    return {
        "prefill": prefill.key.worker_id if prefill is not None else None,
        "decode": scored.choice.decode.key.worker_id,
        "cost": scored.cost.terms(),
    }


def _is_fresh(worker: WorkerState, now_s: float) -> bool:
    return worker.lost_at_s is not None and now_s - worker.lost_at_s <= LOST_SHOWN_S


def _reasons(worker: WorkerState) -> list[str]:
    """What speaks against full health."""
    name, state = worker.key.worker_id, worker.state
    if state == "lost":
        left_on_purpose = worker.load is not None and worker.load.state == "draining"
        return [] if left_on_purpose else [f"{name} is lost"]
    if state != "ready":
        return [f"{name} is {state}"]
    links = worker.load.links if worker.load is not None else ()
    return [
        f"link {link.peer_id} -> {name} is {link.state}" + (f": {link.reason}" * bool(link.reason))
        for link in links
        if link.state != "ready"
    ]


def _missing_links(ready: list[WorkerState]) -> list[str]:
    """Workers that could take part in a hand-over but have nobody to do it with."""
    pools = {pool: [w for w in ready if w.description.pool == pool] for pool in (PREFILL, DECODE)}
    if not pools[PREFILL] or not pools[DECODE]:
        return []
    views = [view for worker in pools[DECODE] if (view := worker.view()) is not None]
    linked = {key for view in views for key in view.links} | {v.key for v in views if v.links}
    return [
        f"{worker.key.worker_id} has no ready link" for worker in ready if worker.key not in linked
    ]


def _place(worker: WorkerState) -> Place:
    return Place(worker.description.node_id, worker.description.zone)


def _describe(worker: WorkerState, places: Mapping[str, Place], now_s: float) -> dict[str, object]:
    state, description = worker.state, worker.description
    load = worker.load if worker.load is not None and state != "lost" else None
    here = places[worker.key.worker_id]
    return {
        "id": description.worker_id,
        "pool": description.pool,
        "pid": description.pid,
        "node": description.node_id,
        "zone": description.zone,
        "start_s": dict(description.start_s),
        "state": state,
        "incarnation": description.incarnation,
        "running": load.num_running if load else 0,
        "waiting": load.num_waiting if load else 0,
        "transferring": load.num_transferring if load else 0,
        "heartbeat_age_s": worker.heartbeat_age_s(now_s),
        "kv": _describe_blocks(load.blocks) if load else {},
        "memory": _describe_memory(worker.hello.memory) if load and worker.hello else {},
        "links": [_describe_link(link, here, places) for link in load.links] if load else [],
    }


def _describe_blocks(blocks: state_pb2.BlockCounts) -> dict[str, int]:
    names = ("free", "cached", "used", "held", "quarantined", "total")
    return {name: getattr(blocks, name) for name in names}


def _describe_memory(memory: state_pb2.MemoryReport) -> dict[str, int]:
    names = ("weights_bytes", "kv_bytes", "buffer_bytes", "max_concurrency")
    return {name: getattr(memory, name) for name in names}


def _describe_link(
    link: state_pb2.LinkStatus, here: Place, places: Mapping[str, Place]
) -> dict[str, object]:
    there = places.get(link.peer_id)
    return {
        "peer": link.peer_id,
        # The narrowest of node, zone and any that holds both ends; empty: the other is not known.
        "distance": "" if there is None else here.reach_to(there),
        "state": link.state,
        "generation": link.generation,
        "backend": link.backend,
        "reason": link.reason,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "moved_bytes": link.moved_bytes,
    }
