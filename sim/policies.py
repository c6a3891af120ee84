"""The policies ours is compared with: what others publish, on the same views of the same workers.

Each chooses a prefill worker first and then one of the decode workers linked to it; none of them
weighs a pair as one, none lets a decode worker compute a prompt while a prefill worker lives.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

from router.cost import Cost
from router.joint_scorer import JointCostScorer
from router.policy import (
    CheapestPicker,
    Choice,
    Decision,
    FilteredPolicy,
    Policy,
    RouteRequest,
    ScoredChoice,
)
from router.pools import Pools
from router.worker_view import WorkerView

# SGLang's cache_aware, its published defaults.
CACHE_THRESHOLD = 0.5
BALANCE_ABS_THRESHOLD = 32
BALANCE_REL_THRESHOLD = 1.1

Rank = Callable[[RouteRequest, Sequence[WorkerView]], WorkerView]


class TwoStepPolicy:
    """A prefill worker, then a decode worker; a decode worker alone when there is no pair."""

    def __init__(self, choose_prefill: Rank, choose_decode: Rank) -> None:
        self._choose_prefill = choose_prefill
        self._choose_decode = choose_decode

    def pick(self, request: RouteRequest, pools: Pools) -> Decision | None:
        """Decide, or return None while no choice exists."""
        prefill = _avoid(request, _keep_open(request, pools.prefill))
        decode = _avoid(request, _keep_open(request, pools.decode))
        if not decode:
            return None
        feeders = [each for each in prefill if _linked(each, decode)]
        if not feeders:
            return _decision(None, self._choose_decode(request, decode))
        feeder = self._choose_prefill(request, feeders)
        return _decision(feeder, self._choose_decode(request, _linked(feeder, decode)))


class RoundRobin:
    """Everyone in turn."""

    def __init__(self) -> None:
        self._turns: Mapping[str, itertools.count[int]] = {
            "prefill": itertools.count(),
            "decode": itertools.count(),
        }

    def __call__(self, request: RouteRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Take the next."""
        del request
        return workers[next(self._turns[workers[0].pool]) % len(workers)]


class LeastLoaded:
    """Who has the fewest prompt tokens to compute, then the fewest requests."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, request: RouteRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Take the least loaded."""
        del request
        return min(
            workers,
            key=lambda each: (each.num_tokens_ahead, each.num_requests, self._rng.random()),
        )


class CacheAware:
    """SGLang's cache_aware: the longest match, unless loads are too unequal or it is short."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, request: RouteRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Take the best match or the least loaded."""
        loads = [each.num_requests for each in workers]
        most, least = max(loads), min(loads)
        is_unequal = most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least
        luck = self._rng.random
        if not is_unequal:
            cached = request.cached_prefill.num_tokens_of
            best = min(workers, key=lambda each: (-cached(each), each.num_requests, luck()))
            if cached(best) > CACHE_THRESHOLD * request.num_tokens:
                return best
        return min(workers, key=lambda each: (each.num_requests, luck()))


class DynamoPrefill:
    """Dynamo's cost, weights at their defaults: blocks to compute, plus blocks in use."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, request: RouteRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Take the cheapest."""
        cached, luck = request.cached_prefill.num_tokens_of, self._rng.random

        def cost(worker: WorkerView) -> tuple[float, float]:
            num_uncached = max(request.num_tokens - cached(worker), 0)
            num_tokens = worker.num_tokens_ahead + num_uncached
            return num_tokens / worker.block_size + worker.num_used_blocks, luck()

        return min(workers, key=cost)


class DynamoDecode:
    """The same for the decode worker, where a cached prefix counts for nothing.

    Dynamo counts the blocks of all requests it sent to a worker. Those still on their way are not
    in the worker's own count; each stands for the blocks of a mean request.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._mean_tokens = 0.0

    def __call__(self, request: RouteRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Take the one with the fewest blocks in use."""
        self._mean_tokens += 0.05 * (request.num_tokens - self._mean_tokens)
        luck = self._rng.random

        def cost(worker: WorkerView) -> tuple[float, float]:
            num_coming = worker.num_transferring + worker.pending.num_requests
            num_blocks = num_coming * self._mean_tokens / worker.block_size
            return worker.num_used_blocks + num_blocks, luck()

        return min(workers, key=cost)


def _linked(feeder: WorkerView, decode: Sequence[WorkerView]) -> list[WorkerView]:
    return [each for each in decode if feeder.key in each.links]


def _keep_open(request: RouteRequest, workers: Sequence[WorkerView]) -> list[WorkerView]:
    return [each for each in workers if each.is_open and each.could_hold(request.num_tokens)]


def _avoid(request: RouteRequest, workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    # As long as anyone else can do it.
    return [each for each in workers if each.key not in request.excluded] or workers


def _decision(prefill: WorkerView | None, decode: WorkerView) -> Decision:
    cost = Cost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Decision(
        chosen=ScoredChoice(Choice(prefill, decode), cost), next_best=None, num_choices=1
    )


def make_policy(name: str, rng: random.Random, *, local_prefill: str = "auto") -> Policy:
    """One of POLICIES by its name."""
    if name == "relevo":
        return FilteredPolicy(
            local_prefill=local_prefill, scorer=JointCostScorer(), picker=CheapestPicker(rng)
        )
    if name == "round-robin":
        turns = RoundRobin()
        return TwoStepPolicy(turns, turns)
    if name == "least-loaded":
        least = LeastLoaded(rng)
        return TwoStepPolicy(least, least)
    if name == "prefix-affinity":
        return TwoStepPolicy(CacheAware(rng), LeastLoaded(rng))
    if name == "dynamo-cost":
        return TwoStepPolicy(DynamoPrefill(rng), DynamoDecode(rng))
    raise ValueError(f"Got policy {name!r} but expected one of {', '.join(POLICIES)}")


POLICIES = ("relevo", "round-robin", "least-loaded", "prefix-affinity", "dynamo-cost")
