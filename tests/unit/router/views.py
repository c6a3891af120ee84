"""Plain worker views for tests of cost and policy, and a fleet made of them."""

from collections.abc import Sequence
from typing import Any

from router.pools import Pools
from router.prefix_index import PrefixIndex
from router.worker_view import (
    DECODE,
    PREFILL,
    LinkView,
    Pending,
    WorkerKey,
    WorkerView,
)

LINK = LinkView(bandwidth_bytes_per_s=1e8, latency_s=0.001, queued_bytes=0)
FACTS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 4096,
    "max_num_batched_tokens": 128,
    "block_size": 16,
    "num_kv_blocks": 256,
    "kv_bytes_per_token": 1000,
    "num_free_blocks": 256,
    "prefill_tokens_per_s": 1000.0,
    "step_s": 0.01,
}
TOKEN_S = 1 / 1000.0 + 0.01 / 128  # of one prompt token on such a worker


def prefill(number: int = 0, **facts: Any) -> WorkerView:
    return WorkerView(key=WorkerKey(f"prefill-{number}", 1), pool=PREFILL, **{**FACTS, **facts})


def decode(number: int = 0, *, peers: int = 1, **facts: Any) -> WorkerView:
    links = {WorkerKey(f"prefill-{n}", 1): LINK for n in range(peers)}
    key = WorkerKey(f"decode-{number}", 1)
    return WorkerView(key=key, pool=DECODE, **{**FACTS, "links": links, **facts})


def pools(prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> Pools:
    return Pools([*prefill, *decode])


class FakeFleet:
    """Views that tests set."""

    def __init__(self, *views: WorkerView) -> None:
        self.indexes = {PREFILL: PrefixIndex(), DECODE: PrefixIndex()}
        self.current = list(views)
        self.picks: dict[WorkerKey, list[Pending]] = {}
        for view in views:
            self.indexes[view.pool].add_worker(view.key, limit=100, scheme=view.scheme)

    def pools(self) -> Pools:
        return pools(
            [view for view in self.current if view.pool == PREFILL],
            [view for view in self.current if view.pool == DECODE],
        )

    def add_pick(self, key: WorkerKey, pick_id: int, pending: Pending, *, now_s: float) -> None:
        self.picks.setdefault(key, []).append(pending)
