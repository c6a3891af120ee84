"""Once a second the ingress looks at the cluster and itself: for metrics, dashboard and log."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from api.operations import traffic
from api.operations.cluster_events import ClusterEvents
from api.operations.traffic import Traffic, TrafficSummary
from api.upstream import Upstream
from telemetry import metrics
from telemetry.metrics import Metrics
from telemetry.prometheus_sink import PrometheusSink

PERIOD_S: Final = 1.0
STATS_PERIOD_S: Final = 10.0
_POOLS = ("prefill", "decode")
_WORKER_STATES = ("starting", "ready", "draining", "lost")
_LINK_STATES = ("connecting", "ready", "broken", "incompatible")

_LOGGER = logging.getLogger("relevo.stats")


class Pulse:
    """Owns the one task that looks; `ticked` is notified after each look."""

    def __init__(
        self,
        upstream: Upstream,
        sink: PrometheusSink,
        metrics_facade: Metrics,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstream = upstream
        self._sink = sink
        self._metrics = metrics_facade
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self._stats_at_s = now()
        self.started_at_s = now()
        self.traffic = Traffic()
        self.events = ClusterEvents()
        self.ticked = asyncio.Condition()
        self.num_ticks = 0
        self.stats = ""  # the last line of statistics of which something happened
        self.num_stats = 0  # how many of these there were

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="pulse")

    async def stop(self) -> None:
        """Look no more; whoever else is told of the numbers gets the last ones."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._metrics.flush)

    @property
    def uptime_s(self) -> float:
        """Since this ingress was made."""
        return self._now() - self.started_at_s

    def look(self) -> None:
        """Take one look."""
        status = self._upstream.status()
        self._set_gauges(status)
        self.traffic.take(self._sink.samples(traffic.METRICS), now_s=self._now())
        self.events.update(status)
        if self._now() - self._stats_at_s >= STATS_PERIOD_S:
            self._stats_at_s = self._now()
            self._log_stats(status, self.traffic.summary())

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                # What is shown of the cluster must not depend on every number being there.
                _LOGGER.exception("A look at the cluster failed")
            async with self.ticked:
                self.num_ticks += 1
                self.ticked.notify_all()
            await asyncio.sleep(PERIOD_S)

    def _set_gauges(self, status: Mapping[str, Any]) -> None:
        self._metrics.set(metrics.ROUTER_WAITING_REQUESTS, self._upstream.num_waiting)
        workers = Counter((each["pool"], each["state"]) for each in status["workers"])
        for pool in _POOLS:
            for state in _WORKER_STATES:
                self._metrics.set(metrics.WORKERS, workers[pool, state], pool=pool, state=state)
        for pool, scaling in status.get("scaling", {}).items():
            self._metrics.set(metrics.WORKERS_TARGET, scaling["target"], pool=pool)
            self._metrics.set(metrics.WORKERS_DEMAND, scaling["demand"], pool=pool)
        links = Counter(
            link["state"]
            for each in status["workers"]
            if each["pool"] == "decode"
            for link in each["links"]
        )
        for state in _LINK_STATES:
            self._metrics.set(metrics.LINKS, links[state], state=state)

    def _log_stats(self, status: Mapping[str, Any], traffic: TrafficSummary) -> None:
        workers = status["workers"]
        num_running, num_waiting = (
            sum(each[key] for each in workers) for key in ("running", "waiting")
        )
        num_queued = self._upstream.num_waiting
        is_idle = traffic.is_idle and not (num_running or num_waiting or num_queued)
        used, total = (sum(each["kv"].get(key, 0) for each in workers) for key in ("used", "total"))
        line = (
            f"prompt {traffic.prompt_tokens_per_s:.1f} tokens/s,"
            f" output {traffic.output_tokens_per_s:.1f} tokens/s,"
            f" {traffic.requests_per_s:.2f} requests/s;"
            f" {num_running} running, {num_waiting} waiting, {num_queued} queued;"
            f" KV {100 * used / max(total, 1):.1f} % used;"
            f" cache hits {100 * (traffic.cache_hit_share or 0.0):.1f} %;"
            f" first token p50 {traffic.first_token_p50_s or 0.0:.3f} s,"
            f" p95 {traffic.first_token_p95_s or 0.0:.3f} s"
        )
        _LOGGER.log(logging.DEBUG if is_idle else logging.INFO, "%s", line)
        if not is_idle:
            self.stats = line
            self.num_stats += 1
