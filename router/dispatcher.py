"""Chooses workers for a request now, or as soon as it is its turn and a choice exists."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.config import RouterConfig
from router.errors import NeverFits, NoWorkers, QueueFull, RequestTimeout
from router.policy import CheapestPicker, Decision, Hit, Policy, RouteRequest, list_choices
from router.prompt import Prompt
from router.report import RequestReport
from router.waiting_queue import WaitingQueue
from router.worker_state import WorkerState
from router.worker_view import DECODE, PREFILL, Pending, WorkerKey, WorkerView
from router.workers import Workers

NUM_ROUTES_KEPT = 256
NOT_READY_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
FIRST_MEAN_TOKENS = 128.0
FIRST_MEAN_SERVICE_S = 1.0
LEARNING_SHARE = 0.1
# A prediction may be this many times too pessimistic before a deadline counts as hopeless.
HOPELESS_FACTOR = 2.0
MAX_TRANSFER_ID = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A decision that was taken: the workers count it already."""

    prefill: WorkerState | None
    decode: WorkerState
    decision: Decision
    transfer_id: int
    num_predicted_tokens: int  # cached where the prompt will be computed
    waited_s: float  # in the queue
    chosen_at_s: float


class Dispatcher:
    """Owns the policy, the waiting queue and the log of decisions."""

    def __init__(
        self,
        config: RouterConfig,
        workers: Workers,
        *,
        rng: random.Random,
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._workers = workers
        self._rng = rng
        self._now = now
        self._policy = Policy(local_prefill=config.local_prefill, picker=CheapestPicker(rng))
        self._queue: WaitingQueue[Decision] = WaitingQueue(
            limit=self.max_waiting, retry_after_s=self.retry_after_s
        )
        self._mean_tokens = FIRST_MEAN_TOKENS
        self._mean_service_s = FIRST_MEAN_SERVICE_S
        self._last_num_seqs = 0
        self.has_been_ready = False
        self.routes: deque[tuple[str, int, Route]] = deque(maxlen=NUM_ROUTES_KEPT)

    def workers_changed(self) -> None:
        """Somebody came, spoke or left."""
        self.has_been_ready = self.has_been_ready or self.is_ready()
        self._last_num_seqs = self._num_seqs(PREFILL, DECODE) or self._last_num_seqs
        self._queue.wake()

    def is_ready(self) -> bool:
        """Whether a choice exists that may be taken, however busy its workers are."""
        return bool(
            list_choices(
                self._workers.views(PREFILL),
                self._workers.views(DECODE),
                local_prefill=self._config.local_prefill,
            )
        )

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def max_waiting(self) -> int:
        """How many new requests may wait."""
        if self._config.max_waiting_requests is not None:
            return self._config.max_waiting_requests
        # With all workers lost the queue keeps the size it had: they are to come back.
        return 4 * self._last_num_seqs

    def retry_after_s(self) -> float:
        """When the queue should have drained."""
        num_slots = max(self._num_seqs(DECODE), 1)
        drain_s = (len(self._queue) + 1) * self._mean_service_s / num_slots
        return min(max(drain_s, 1.0), LONGEST_RETRY_S)

    def learn(self, report: RequestReport) -> None:
        """Take the measure of a finished request."""
        if report.first_token_s is None:
            return
        tokens, service_s = report.num_completion_tokens, report.elapsed_s - report.queue_s
        self._mean_tokens += LEARNING_SHARE * (tokens - self._mean_tokens)
        self._mean_service_s += LEARNING_SHARE * (service_s - self._mean_service_s)

    def expected_tokens(self, max_tokens: int) -> int:
        """How many tokens a request will probably generate."""
        return max(min(max_tokens, round(self._mean_tokens)), 1)

    async def choose(
        self,
        prompt: Prompt,
        *,
        excluded: frozenset[WorkerKey],
        timeout_s: float,
        is_admitted: bool,
    ) -> Route:
        """Choose and count the choice; a RouterError says why there is none."""
        self._check_possible(prompt)
        asked_at_s = self._now()
        num_tries = 0

        def try_pick() -> Decision | None:
            nonlocal num_tries
            num_tries += 1
            return self._pick(prompt, excluded)

        try:
            decision = await self._queue.take(
                try_pick, timeout_s=timeout_s, is_admitted=is_admitted
            )
        except TimeoutError:
            raise self._no_choice_came() from None
        waited_s = self._now() - asked_at_s if num_tries > 1 else 0.0
        time_left_s = timeout_s - waited_s
        if not is_admitted:
            self._check_deadline(decision, time_left_s)
        return self._take(prompt, decision, waited_s)

    def _check_possible(self, prompt: Prompt) -> None:
        if not self.has_been_ready:
            raise NoWorkers("no workers are ready yet", NOT_READY_RETRY_S)
        pools = (PREFILL, DECODE) if self._config.local_prefill == "never" else (DECODE,)
        for pool in pools:
            views = self._workers.views(pool)
            if views and not any(view.could_hold(len(prompt)) for view in views):
                raise NeverFits(f"{len(prompt)} tokens are more than any {pool} worker can hold")

    def _check_deadline(self, decision: Decision, time_left_s: float) -> None:
        cost, choice = decision.chosen.cost, decision.chosen.choice
        is_measured = all(worker.prefill_tokens_per_s > 0 for worker in choice.workers)
        if is_measured and cost.queue_s + cost.prefill_s > HOPELESS_FACTOR * time_left_s:
            raise QueueFull("the deadline cannot be met", self.retry_after_s())

    def _no_choice_came(self) -> NoWorkers | RequestTimeout:
        if self.is_ready():
            return RequestTimeout("the deadline passed while all workers were full")
        return NoWorkers("no workers came before the deadline", NOT_READY_RETRY_S)

    def _pick(self, prompt: Prompt, excluded: frozenset[WorkerKey]) -> Decision | None:
        prefill, decode = self._workers.views(PREFILL), self._workers.views(DECODE)
        hits = self._hits(prompt, PREFILL, prefill) | self._hits(prompt, DECODE, decode)
        request = RouteRequest(
            num_tokens=len(prompt),
            num_output_tokens=prompt.num_output_tokens,
            hits=hits,
            excluded=excluded,
        )
        return self._policy.pick(request, prefill, decode)

    def _hits(self, prompt: Prompt, pool: str, views: Sequence[WorkerView]) -> dict[WorkerKey, Hit]:
        hits: dict[WorkerKey, Hit] = {}
        by_scheme: dict[tuple[int, bytes], list[WorkerView]] = {}
        for view in views:
            by_scheme.setdefault((view.block_size, view.hash_root), []).append(view)
        for group in by_scheme.values():
            block_size = group[0].block_size
            found = self._workers.indexes[pool].match(
                prompt.block_hashes(group[0]), [view.key for view in group], now_s=self._now()
            )
            for key, hit in found.items():
                hits[key] = Hit(
                    num_tokens=hit.num_blocks * block_size,
                    num_confirmed_tokens=hit.num_confirmed_blocks * block_size,
                )
        return hits

    def _take(self, prompt: Prompt, decision: Decision, waited_s: float) -> Route:
        choice = decision.chosen.choice
        prefill = self._workers.get(choice.prefill.key) if choice.prefill is not None else None
        decode = self._workers.get(choice.decode.key)
        assert decode is not None, choice
        assert (prefill is None) == (choice.prefill is None), choice
        route = Route(
            prefill=prefill,
            decode=decode,
            decision=decision,
            transfer_id=self._rng.randint(1, MAX_TRANSFER_ID),
            num_predicted_tokens=decision.hit(choice.prefill or choice.decode).num_tokens,
            waited_s=waited_s,
            chosen_at_s=self._now(),
        )
        self._count(prompt, route, choice.prefill, choice.decode)
        return route

    def _count(
        self, prompt: Prompt, route: Route, prefill: WorkerView | None, decode: WorkerView
    ) -> None:
        """Until their reports include it, both workers carry what was just sent to them."""
        now_s, decision = self._now(), route.decision
        # Predicted hits count as work here, or a burst with one prefix would pile up on one worker.
        computing = prefill or decode
        to_compute = len(prompt) - decision.hit(computing).num_confirmed_tokens
        to_send = len(prompt) - decision.hit(decode).num_tokens if prefill else 0
        if prefill is not None and route.prefill is not None:
            pending = Pending(num_requests=1, num_tokens=to_compute)
            route.prefill.add_pick(route.transfer_id, pending, now_s=now_s)
            hashes = prompt.block_hashes(prefill)
            self._workers.indexes[PREFILL].predict(prefill.key, hashes, now_s=now_s)
        pending = Pending(
            num_requests=1,
            num_tokens=0 if prefill else to_compute,
            num_bytes=to_send * decode.kv_bytes_per_token,
        )
        route.decode.add_pick(route.transfer_id, pending, now_s=now_s)
        hashes = prompt.block_hashes(decode)
        self._workers.indexes[DECODE].predict(decode.key, hashes, now_s=now_s)

    def _num_seqs(self, *pools: str) -> int:
        return sum(view.max_num_seqs for pool in pools for view in self._workers.views(pool))
