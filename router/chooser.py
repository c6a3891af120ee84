"""From a prompt to a decision, and what follows from it; plain data and a clock, no event loop.

pick   hash the prompt, ask both pools' indexes, let the policy decide
take   until their reports include it, both workers carry what is sent to them; the indexes expect
       the prompt's blocks there
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.block_name import BlockName, BlockScheme
from router.cached_tokens import CachedTokens
from router.policy import Decision, Policy, RouteRequest
from router.pools import Pools
from router.prefix_index import PrefixIndex
from router.session_ring import SessionRing
from router.worker_view import DECODE, PREFILL, Pending, WorkerKey, WorkerView

MAX_PICK_ID = 2**63 - 1

Openings = tuple[Pools, int]


class Routable(Protocol):
    """A prompt as far as routing goes."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens it will probably generate."""

    @property
    def num_choices(self) -> int:
        """Continuations that will be decoded together."""

    @property
    def session_key(self) -> str:
        """What its session is called; empty: none."""

    @property
    def skips_cache(self) -> bool:
        """Whether what workers have cached of it is of no use."""

    def __len__(self) -> int:
        """Tokens to be computed or found."""

    def block_names(self, scheme: BlockScheme) -> Sequence[BlockName]:
        """Names of its full blocks."""


class Fleet(Protocol):
    """All workers."""

    @property
    def indexes(self) -> Mapping[str, PrefixIndex]:
        """What each pool caches."""

    def pools(self) -> Pools:
        """All connected workers of this moment."""

    def add_pick(self, key: WorkerKey, pick_id: int, pending: Pending, *, now_s: float) -> None:
        """Count a request that is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A decision and what it rests on."""

    decision: Decision
    cached_prefill: CachedTokens
    cached_decode: CachedTokens

    @property
    def num_predicted_tokens(self) -> int:
        """Cached where the prompt will be computed, so we think."""
        prefill, decode = self.decision.chosen.choice
        if prefill is not None:
            return self.cached_prefill.num_tokens_of(prefill)
        return self.cached_decode.num_confirmed_of(decode)


class Chooser:
    """Owns nothing but the policy and the ring of sessions; what is known lies in the fleet."""

    def __init__(
        self, fleet: Fleet, policy: Policy, *, rng: random.Random, now: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._rng = rng
        self._now = now
        self._ring = SessionRing()

    def openings(self) -> Openings:
        """While it is the same, a prompt that had no choice has none."""
        pools = self._fleet.pools()
        return pools, pools.num_openings

    def pick(self, prompt: Routable, excluded: Collection[WorkerKey] = ()) -> Pick | None:
        """Decide; None while no choice exists. Changes nothing."""
        pools = self._fleet.pools()
        cached_prefill, cached_decode = self._cached(prompt, PREFILL), self._cached(prompt, DECODE)
        request = RouteRequest(
            num_tokens=len(prompt),
            num_output_tokens=prompt.num_output_tokens,
            num_choices=prompt.num_choices,
            cached_prefill=cached_prefill,
            cached_decode=cached_decode,
            excluded=excluded,
            session_workers=self._ring.workers(prompt.session_key, pools),
        )
        decision = self._policy.pick(request, pools)
        if decision is None:
            return None
        return Pick(decision=decision, cached_prefill=cached_prefill, cached_decode=cached_decode)

    def _cached(self, prompt: Routable, pool: str) -> CachedTokens:
        if prompt.skips_cache:
            return CachedTokens()
        return self._fleet.indexes[pool].match(prompt.block_names, now_s=self._now())

    def take(self, prompt: Routable, pick: Pick) -> int:
        """Count the picked choice on its workers; returns the pick's random id."""
        pick_id = self._rng.randint(1, MAX_PICK_ID)
        prefill, decode = pick.decision.chosen.choice
        num_bytes = 0
        if prefill is not None:
            self._add(prompt, pick_id, prefill, pick.cached_prefill)
            num_sent = len(prompt) - pick.cached_decode.num_tokens_of(decode)
            num_bytes = max(num_sent, 0) * decode.kv_bytes_per_token
        self._add(
            prompt, pick_id, decode, pick.cached_decode, num_bytes, has_kv=prefill is not None
        )
        return pick_id

    def _add(
        self,
        prompt: Routable,
        pick_id: int,
        worker: WorkerView,
        cached: CachedTokens,
        num_bytes: int = 0,
        *,
        has_kv: bool = False,
    ) -> None:
        now_s = self._now()
        # Predicted hits count as work here, or a burst with one prefix would pile up on one worker.
        num_confirmed = cached.num_confirmed_of(worker)
        pending = Pending(
            num_requests=prompt.num_choices if worker.pool == DECODE else 1,
            num_tokens=0 if has_kv else len(prompt) - num_confirmed,
            num_bytes=num_bytes,
            num_kv_tokens=len(prompt) - num_confirmed if worker.pool == DECODE else 0,
        )
        self._fleet.add_pick(worker.key, pick_id, pending, now_s=now_s)
        names = prompt.block_names(worker.scheme)[num_confirmed // worker.block_size :]
        self._fleet.indexes[worker.pool].predict(worker.key, names, now_s=now_s)
