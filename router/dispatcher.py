"""Chooses workers for a request now, or as soon as it is its turn and a choice exists."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.chooser import Chooser, Openings, Pick
from router.config import RouterConfig
from router.errors import NeverFits, NoWorkers, QueueFull, RequestTimeout
from router.joint_scorer import JointCostScorer
from router.policy import CheapestPicker, Decision, FilteredPolicy, has_choice
from router.prompt import Prompt
from router.report import RequestReport
from router.request import RoutedRequest, Tenant
from router.typical_output import TypicalOutput
from router.waiting_queue import HOPELESS_FACTOR, WORST_CLASS, Place, WaitingQueue
from router.worker_state import WorkerState
from router.worker_view import DECODE, MAX_BATCHES_AHEAD, PREFILL, WorkerKey
from router.workers import Workers

NUM_ROUTES_KEPT = 256
NOT_READY_RETRY_S = 1.0
FIRST_MEAN_SERVICE_S = 1.0
LEARNING_SHARE = 0.1


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

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """Those that were chosen."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRoute:
    """A route and whose it was."""

    request_id: str
    tenant: str
    epoch: int  # of the request: its attempts count from 1
    route: Route


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
        self._now = now
        policy = FilteredPolicy(
            local_prefill=config.local_prefill,
            scorer=JointCostScorer(),
            picker=CheapestPicker(rng),
        )
        self._chooser = Chooser(workers.fleet, policy, rng=rng, now=now)
        self._queue: WaitingQueue[Pick] = WaitingQueue(
            limit=self.max_waiting, expected_turn_s=self._expected_turn_s, now=now
        )
        self._typical = TypicalOutput()
        self.expected_tokens = self._typical.expected_tokens
        self._mean_service_s = FIRST_MEAN_SERVICE_S
        self._last_num_seqs = 0
        self._num_most_places = 0
        self._most_places: Sequence[int] = ()  # of each decode worker, when there were most
        self.has_been_ready = False
        self.routes: deque[PastRoute] = deque(maxlen=NUM_ROUTES_KEPT)

    def workers_changed(self, *, is_membership: bool = True) -> None:
        """Somebody spoke; or came or left, if `is_membership`."""
        self.has_been_ready = self.has_been_ready or self.is_ready()
        # A thousand workers speak many thousand times a second: not a look at all of them each.
        if is_membership:
            self._count_places()
        self._queue.wake()

    def _count_places(self) -> None:
        self._last_num_seqs = self._num_seqs(PREFILL, DECODE) or self._last_num_seqs
        if (num_places := self._num_seqs(DECODE)) > self._num_most_places:
            self._num_most_places = num_places
            self._most_places = [view.max_num_seqs for view in self._workers.fleet.pools().decode]

    def is_ready(self) -> bool:
        """Whether a choice exists that may be taken, however busy its workers are."""
        return has_choice(self._workers.fleet.pools(), local_prefill=self._config.local_prefill)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Of the requests in the queue, with what they are expected to generate."""
        return self._queue.num_tokens

    def max_waiting(self) -> int:
        """How many new requests of each class may wait."""
        if self._config.max_waiting_requests is not None:
            return self._config.max_waiting_requests
        # With all workers lost the queue keeps the size it had: they are to come back.
        return 4 * self._last_num_seqs

    def max_requests(self, num_choices: int) -> int:
        """How many requests of this many choices can be held at once; lost workers come back."""
        # A worker takes one more as long as it is not full.
        num_running = sum(
            -(-MAX_BATCHES_AHEAD * places // num_choices) for places in self._most_places
        )
        return num_running + self.max_waiting()

    def has_room(self, tenant: Tenant, priority: int, *, num_unfinished: int) -> bool:
        """Whether a new request of this tenant and class need not be refused for the load.

        `num_unfinished` of its own kind are under way; those that do not stand in the queue yet
        will before it.
        """
        if not self.has_been_ready:
            return True  # refused for that, in words of its own
        most = MAX_BATCHES_AHEAD * self._num_most_places + self.max_waiting()
        return num_unfinished < most and self._queue.has_room(tenant, priority)

    def retry_after_s(self, priority: int = WORST_CLASS) -> float:
        """When the queue should have drained."""
        return self._queue.retry_after_s(priority)

    def _expected_turn_s(self) -> float:
        return self._mean_service_s / max(self._num_seqs(DECODE), 1)

    def learn(self, request: RoutedRequest, report: RequestReport) -> None:
        """Take the measure of a finished request."""
        if report.first_token_s is None:
            return
        tokens, service_s = report.num_completion_tokens, report.elapsed_s - report.queue_s
        self._queue.charge(request.tenant, tokens)
        self._typical.learn(tokens)
        self._mean_service_s += LEARNING_SHARE * (service_s - self._mean_service_s)

    async def choose(
        self,
        prompt: Prompt,
        *,
        place: Place,
        excluded: frozenset[WorkerKey],
        timeout_s: float,
    ) -> Route:
        """Choose and count the choice; a RouterError says why there is none."""
        self._check_possible(prompt)
        asked_at_s = self._now()
        must_wait = self._queue.must_wait(place)
        had_none: Openings | None = None  # the openings when last tried

        def try_pick() -> Pick | None:
            nonlocal had_none
            # Workers report many times a second, mostly that they are as full as before.
            if (openings := self._chooser.openings()) == had_none:
                return None
            if (pick := self._chooser.pick(prompt, excluded)) is None:
                had_none = openings
            return pick

        try:
            pick = await self._queue.take(try_pick, place, timeout_s=timeout_s)
        except TimeoutError:
            raise self._no_choice_came() from None
        has_waited = must_wait or had_none is not None
        waited_s = self._now() - asked_at_s if has_waited else 0.0
        if not place.is_admitted:
            self._check_deadline(pick.decision, timeout_s - waited_s)
        return self._take(prompt, pick, waited_s)

    def _check_possible(self, prompt: Prompt) -> None:
        if not self.has_been_ready:
            raise NoWorkers("no workers are ready yet", NOT_READY_RETRY_S)
        pools = (PREFILL, DECODE) if self._config.local_prefill == "never" else (DECODE,)
        for pool in pools:
            views = self._workers.fleet.pools().tables[pool].views
            if views and not any(
                view.could_hold(len(prompt), prompt.num_choices) for view in views
            ):
                choices = f" in {prompt.num_choices} choices" if prompt.num_choices > 1 else ""
                raise NeverFits(
                    f"{len(prompt)} tokens{choices} are more than the "
                    f"{max(view.max_tokens for view in views)} that the largest {pool} worker can "
                    "hold; shorten the prompt"
                )

    def _check_deadline(self, decision: Decision, time_left_s: float) -> None:
        cost, choice = decision.chosen.cost, decision.chosen.choice
        is_measured = all(worker.prefill_tokens_per_s > 0 for worker in choice.workers)
        if is_measured and cost.queue_s + cost.prefill_s > HOPELESS_FACTOR * time_left_s:
            raise QueueFull("the deadline cannot be met", self.retry_after_s())

    def _no_choice_came(self) -> NoWorkers | RequestTimeout:
        if self.is_ready():
            return RequestTimeout("the deadline passed while all workers were full")
        return NoWorkers("no workers came before the deadline", NOT_READY_RETRY_S)

    def _take(self, prompt: Prompt, pick: Pick, waited_s: float) -> Route:
        prefill, decode = pick.decision.chosen.choice
        states = self._workers.fleet.states
        return Route(
            prefill=states[prefill.key] if prefill is not None else None,
            decode=states[decode.key],
            decision=pick.decision,
            transfer_id=self._chooser.take(prompt, pick),
            num_predicted_tokens=pick.num_predicted_tokens,
            waited_s=waited_s,
            chosen_at_s=self._now(),
        )

    def _num_seqs(self, *pools: str) -> int:
        tables = self._workers.fleet.pools().tables
        return int(sum(tables[pool].columns.max_num_seqs.sum() for pool in pools))
