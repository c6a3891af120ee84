"""Turns what a worker said on its state stream into the frozen data the policy sees."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from relevo.v1 import state_pb2

from engine.block_hash import BlockHash
from router.block_name import BlockScheme
from router.typical_rates import StepCost, TypicalRates
from router.worker_view import LinkView, Pending, WorkerKey, WorkerView

SLOWEST_PER_S = 1e-3  # tokens or bytes
FASTEST_PER_S = 1e15
LONGEST_S = 1e9


class Standing(NamedTuple):
    """What the router itself thinks of a worker."""

    is_routable: bool
    has_refused: bool
    pending: Pending
    links: Mapping[WorkerKey, LinkView]  # its ready ones
    distrusted_links: Collection[WorkerKey]
    slot: int  # in its pool's index


def learn_rates(rates: TypicalRates, key: WorkerKey, pool: str, load: state_pb2.WorkerLoad) -> None:
    """Let the others know how fast this worker is."""
    age_s = _seconds(load.rates_age_s)
    rates.learn(key, pool, _speed(load.prefill_tokens_per_s), age_s, _step_cost(load))


def scheme_of(hello: state_pb2.WatchStateResponse.Hello) -> BlockScheme:
    """How the worker cuts and names its blocks."""
    return BlockScheme(max(hello.layout.block_size, 1), BlockHash(hello.hash_root))


def facts_of(
    hello: state_pb2.WatchStateResponse.Hello,
    load: state_pb2.WorkerLoad | None,
    rates: TypicalRates,
) -> dict[str, Any]:
    """What the worker told, by the names of a view's fields; it stays until the next message."""
    scheme = scheme_of(hello)
    return {
        "key": WorkerKey(hello.worker.worker_id, hello.worker.incarnation),
        "pool": hello.pool,
        "max_num_seqs": hello.max_num_seqs,
        "max_model_len": hello.max_model_len,
        "max_num_batched_tokens": hello.max_num_batched_tokens,
        "block_size": scheme.block_size,
        "hash_root": scheme.hash_root,
        "num_kv_blocks": hello.num_kv_blocks,
        "kv_bytes_per_token": max(hello.kv_bytes_per_token, 0),
        **({} if load is None else _facts_of_load(hello.pool, load, rates)),
    }


class ReadyLinks:
    """The ready links of a decode worker. Mostly they are as they were, and many to read."""

    def __init__(self) -> None:
        self._load: state_pb2.WorkerLoad | None = None  # the last that was looked at
        self._links: Mapping[WorkerKey, LinkView] = {}

    def of(self, load: state_pb2.WorkerLoad | None) -> Mapping[WorkerKey, LinkView]:
        """By peer; the same object as before if they are the same."""
        before, self._load = self._load, load
        if load is None:
            self._links = {}
        elif load is not before and (before is None or before.links != load.links):
            self._links = {
                WorkerKey(link.peer_id, link.peer_incarnation): _view_link(link)
                for link in load.links
                if link.state == "ready"
            }
        return self._links


def _view_link(link: state_pb2.LinkStatus) -> LinkView:
    return LinkView(
        _speed(link.bandwidth_bytes_per_s), _seconds(link.latency_s), max(link.queued_bytes, 0)
    )


def build_view(facts: Mapping[str, Any], standing: Standing) -> WorkerView:
    """One view of this moment."""
    links, distrusted = standing.links, standing.distrusted_links
    return WorkerView(
        **facts,
        is_routable=standing.is_routable,
        has_refused=standing.has_refused,
        pending=standing.pending,
        slot=standing.slot,
        links={k: link for k, link in links.items() if k not in distrusted}
        if distrusted
        else links,
    )


def _facts_of_load(pool: str, load: state_pb2.WorkerLoad, rates: TypicalRates) -> dict[str, Any]:
    step_cost = rates.step_cost(pool, _step_cost(load))
    tokens_per_s, age_s = _speed(load.prefill_tokens_per_s), _seconds(load.rates_age_s)
    blocks = load.blocks
    return {
        "num_running": max(load.num_running, 0),
        "num_waiting": max(load.num_waiting, 0),
        "num_transferring": max(load.num_transferring, 0),
        "num_promised_tokens": max(load.num_promised_tokens, 0),
        "num_waiting_uncached_tokens": max(load.num_waiting_uncached_tokens, 0),
        "num_free_blocks": max(blocks.free + blocks.cached, 0),
        "num_used_blocks": max(blocks.used, 0),
        "prefill_tokens_per_s": rates.current(pool, tokens_per_s, age_s),
        "step_s": _seconds(load.step_s),
        "request_s": step_cost.request_s,
        "kv_token_s": step_cost.kv_token_s,
    }


def _step_cost(load: state_pb2.WorkerLoad) -> StepCost:
    return StepCost(_seconds(load.request_s), _seconds(load.kv_token_s))


# One worker's nonsense must not reach the sums over all: what no measurement gives counts as not
# measured.


def _speed(per_s: float) -> float:
    return per_s if SLOWEST_PER_S <= per_s <= FASTEST_PER_S else 0.0


def _seconds(seconds: float) -> float:
    return seconds if 0.0 <= seconds <= LONGEST_S else 0.0
