"""The router: takes prompts, gives tokens, and loses nothing when a worker does.

Life of a request:

1. generate   a Generation is made; its clock started when the request arrived (generation.py)
2. choose     the Dispatcher picks a linked pair, or a decode worker alone, by one joint cost;
              while no choice exists the request waits in a fair order (dispatcher.py, chooser.py,
              policy.py, joint_scorer.py, cost.py; waiting_queue.py, fair_line.py)
3. try        an Attempt opens Decode and Prefill at once and merges their tokens by position;
              each goes to the consumer in the moment it arrives (attempt.py, token_merger.py)
4. recover    a worker failed, froze, refused or drains: choose again and replay prompt + output,
              within the budget; the consumer's stream just goes on (request_run.py, retry.py)
5. end        finish, error, deadline or cancel: every call is cancelled, what the workers held is
              given back, the report is complete (timeline.py, report.py)

What is known of the workers is kept beside all this by their state streams (workers.py, watch.py;
fleet.py, worker_state.py, prefix_index.py).
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from router.config import RouterConfig
from router.discovery import Discovery
from router.dispatcher import Dispatcher
from router.errors import QueueFull
from router.generation import Generation
from router.prefix_index import PrefixIndex
from router.probation import Probation
from router.report import RequestReport
from router.request import LoadReport, ModelInfo, RoutedRequest, Tenant, class_of
from router.request_metrics import RequestMetrics
from router.request_run import RequestRun, RunServices
from router.retry import RetryBudget
from router.retry_quota import RetryQuota
from router.scaling.autoscaler import Autoscaler, Wish
from router.scaling.config import ScalingConfig
from router.scaling.meter import LoadMeter
from router.status import Readiness, build_status, describe_routes
from router.timeline import Timeline
from router.worker_state import WorkerState
from router.worker_view import DECODE
from router.workers import Workers
from rpc.channel import ChannelPool
from telemetry.metrics import Metrics


class Router:
    """Owns the view of the workers and every running request of one ingress."""

    def __init__(  # noqa: PLR0913 - the composition root of this room
        self,
        config: RouterConfig,
        discovery: Discovery,
        channels: ChannelPool,
        *,
        ingress_id: str,
        scaling: ScalingConfig | None = None,
        metrics: Metrics | None = None,
        now: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self.now = now
        rng = rng or random.Random()
        self._workers = Workers(
            discovery, channels, ingress_id=ingress_id, on_change=self._workers_changed, now=now
        )
        self._dispatcher = Dispatcher(config, self._workers, rng=rng, now=now)
        self._autoscaler = Autoscaler(
            scaling or ScalingConfig(),
            LoadMeter(self._workers.fleet),
            is_ready=self.is_ready,
            now=now,
        )
        self.placement: Sequence[str] = ()  # why the workers run where they do, for the status
        self._metrics = RequestMetrics(metrics)
        quota = RetryQuota(now)
        self._services = RunServices(
            dispatcher=self._dispatcher,
            workers=self._workers,
            probation=Probation(),
            channels=channels,
            metrics=self._metrics,
            new_budget=lambda: RetryBudget(config, rng, quota),
            spawn=self._spawn,
            now=now,
        )
        self._running: set[Generation] = set()
        self._unfinished: Counter[tuple[str, int]] = Counter()  # by tenant and class
        self._background: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        """Begin to follow the workers; returns before any is ready."""
        await self._workers.start()

    async def stop(self) -> None:
        """End every request, task and call."""
        await asyncio.gather(*(generation.stop() for generation in list(self._running)))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._workers.stop()

    def generate(self, request: RoutedRequest) -> Generation:
        """Make the iterator of a request's tokens; it starts with the first `anext`."""
        now_s = self.now()
        arrived_at_s = now_s if request.arrived_at is None else request.arrived_at
        timeout_s = self._config.request_timeout_s
        if request.timeout_s is not None:
            timeout_s = request.timeout_s
        deadline_s = arrived_at_s + timeout_s
        timeline = Timeline(
            request.request_id,
            num_prompt_tokens=len(request.token_ids),
            arrived_at_s=arrived_at_s,
            now=self.now,
        )
        generation = Generation(
            RequestRun(request, self._services, timeline, deadline_s),
            timeline,
            metrics=self._metrics,
            running=self._running,
            on_end=partial(self._ended, request),
        )
        self._unfinished[request.tenant.name, class_of(request.priority)] += 1
        return generation

    def has_room(self, tenant: Tenant, priority: int) -> bool:
        """Whether a request of this tenant and priority need not be refused for the load."""
        number = class_of(priority)
        return self._dispatcher.has_room(
            tenant, number, num_unfinished=self._unfinished[tenant.name, number]
        )

    def check_room(self, tenant: Tenant, priority: int) -> None:
        """QueueFull, which counts as a refusal, when there is no room."""
        if not self.has_room(tenant, priority):
            self._metrics.refused()
            hint_s = self._dispatcher.retry_after_s(class_of(priority))
            raise QueueFull("no room for one more of its class and tenant", hint_s)

    def max_requests(self, num_choices: int) -> int:
        """How many requests of this many choices could run or wait at once, all alone."""
        return self._dispatcher.max_requests(num_choices)

    def is_ready(self) -> bool:
        """Whether a choice of workers exists now."""
        return self._dispatcher.is_ready()

    def status(self, num_routes: int = 0, *, tenant: str | None = None) -> dict[str, object]:
        """Return the body of /v1/status, with the last `num_routes` decisions if asked.

        Of one tenant's requests only, where one is named.
        """
        readiness = Readiness(
            is_ready=self.is_ready(), has_been_ready=self._dispatcher.has_been_ready
        )
        body = build_status(self._workers.all(), readiness, now_s=self.now())
        if num_routes > 0:
            past = self._dispatcher.routes
            routes = [each for each in past if tenant is None or each.tenant == tenant]
            body["routes"] = describe_routes(routes[-num_routes:], now_s=self.now())
        if self.placement:
            body["placement"] = list(self.placement)
        if scaling := self._autoscaler.status():
            body["scaling"] = scaling
        return body

    def scale(self) -> Mapping[str, Wish]:
        """Decide anew how many workers each pool that grows and shrinks should have.

        Called about once a second; empty while that is not known.
        """
        self._workers.expect_change()
        return self._autoscaler.tick(
            queued_requests=self._dispatcher.num_waiting,
            queued_tokens=self._dispatcher.num_waiting_tokens,
        )

    def loads(self) -> list[LoadReport]:
        """Return the last load of every live worker, with the last metrics it sent."""
        return [_load_report(each) for each in self._workers.all() if each.is_connected]

    @property
    def model(self) -> ModelInfo | None:
        """What the workers serve; None before the first said Hello."""
        known = [each for each in self._workers.all() if each.hello is not None]
        if not known:
            return None
        known.sort(key=lambda each: (not each.is_connected, each.description.pool != DECODE))
        hello = known[0].hello
        assert hello is not None
        return ModelInfo(
            model_id=hello.layout.model_id,
            model_revision=hello.layout.model_revision,
            dtype=hello.layout.dtype,
            max_model_len=min(each.hello.max_model_len for each in known if each.hello),
            block_size=hello.layout.block_size,
            max_num_seqs=min(
                each.hello.max_num_seqs
                for each in known
                if each.hello and each.description.pool == hello.pool
            ),
            eos_token_ids=tuple(hello.eos_token_ids),
        )

    def worker_states(self) -> list[WorkerState]:
        """Return what is known of each worker process, live or lost; read only."""
        return self._workers.all()

    def index(self, pool: str) -> PrefixIndex:
        """Return what a pool's workers probably cache; read only."""
        return self._workers.fleet.indexes[pool]

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue."""
        return self._dispatcher.num_waiting

    @property
    def max_waiting(self) -> int:
        """How many requests may wait before more are refused."""
        return self._dispatcher.max_waiting()

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def _ended(self, request: RoutedRequest, report: RequestReport) -> None:
        kind = (request.tenant.name, class_of(request.priority))
        self._unfinished[kind] -= 1
        if not self._unfinished[kind]:
            del self._unfinished[kind]
        self._dispatcher.learn(request, report)

    def _workers_changed(self, *, is_membership: bool) -> None:
        self._dispatcher.workers_changed(is_membership=is_membership)

    def _spawn(self, task: asyncio.Future[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _load_report(worker: WorkerState) -> LoadReport:
    return LoadReport(
        worker=worker.description.to_ref(), pool=worker.description.pool, load=worker.full_load()
    )
