"""Plain worker views for tests of cost and policy, and a fleet made of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from router.cached_tokens import CachedTokens
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
    key = WorkerKey(f"prefill-{number}", 1)
    return WorkerView(key=key, pool=PREFILL, slot=number + 1, **{**FACTS, **facts})


def decode(number: int = 0, *, peers: int = 1, **facts: Any) -> WorkerView:
    links = {WorkerKey(f"prefill-{n}", 1): LINK for n in range(peers)}
    key = WorkerKey(f"decode-{number}", 1)
    facts = {**FACTS, "links": links, **facts}
    return WorkerView(key=key, pool=DECODE, slot=number + 1, **facts)


def pools(prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> Pools:
    return Pools([*prefill, *decode])


def cached(**counts: int) -> CachedTokens:
    """Tokens that workers of these views hold, by number: cached(_2=960)."""
    held = np.zeros(200)
    for name, num_tokens in counts.items():
        held[int(name[1:]) + 1] = num_tokens
    return CachedTokens(held, held)


class FakeFleet:
    """Views that tests set."""

    def __init__(self, *views: WorkerView) -> None:
        self.indexes = {PREFILL: PrefixIndex(), DECODE: PrefixIndex()}
        self.picks: dict[WorkerKey, list[Pending]] = {}
        for view in views:
            self.indexes[view.pool].add_worker(view.key, limit=100, scheme=view.scheme)
        self.current = list(views)
        self.kept: Pools | None = None  # instead of the views, if a test sets it

    def pools(self) -> Pools:
        if self.kept is not None:
            return self.kept
        return Pools(
            replace(view, slot=self.indexes[view.pool].slot(view.key)) for view in self.current
        )

    def add_pick(self, key: WorkerKey, pick_id: int, pending: Pending, *, now_s: float) -> None:
        self.picks.setdefault(key, []).append(pending)
