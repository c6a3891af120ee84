"""The Ray Serve wrapper of a worker of either pool: one replica, one worker, one engine."""

import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from kv_transfer.place import ZONE_LABEL, Place
from rpc.start_clock import StartClock, describe_parts
from rpc.worker_metrics import WrapSink
from telemetry.logs import set_up_logging
from workers.config import WorkerConfig
from workers.kind import WorkerKind

_log = logging.getLogger(__name__)


class WorkerReplica:
    """Owns one worker from the replica's start to its end; no request passes through Serve."""

    _worker: Any = None  # until __init__ made it; __del__ runs after a failed one too

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        pool: str,
        kind: WorkerKind,
        config: WorkerConfig,
        wrap_sink: WrapSink,
        name_worker: Callable[[str], str],  # pool -> the worker's id
    ) -> None:
        clock = StartClock()
        set_up_logging()
        self._config = config
        self._worker_id = name_worker(pool)
        node = ray.get_runtime_context()
        worker_class = kind.import_class(config)
        clock.lap("imports")
        self._worker = worker_class(
            self._config,
            worker_id=self._worker_id,
            # Not the process's own start: Ray may hand us an idle process that is older than the
            # replica before this one.
            incarnation=time.time_ns() // 1000,
            place=Place(node.get_node_id(), str(node.get_node_labels().get(ZONE_LABEL, ""))),
            wrap_sink=wrap_sink,
        )
        description = await self._worker.start(clock)
        parts = describe_parts(description.start_s)
        _log.info("%s serves at %s after %s", self._worker_id, description.address, parts)

    def describe(self) -> dict[str, Any]:
        """Who this worker is and where it listens; asked by every ingress through a broadcast."""
        description: dict[str, Any] = self._worker.describe().to_dict()
        return description

    def check_health(self) -> None:
        """Raise when the engine will not recover: Serve then replaces this replica."""
        self._worker.check_health()

    def __repr__(self) -> str:
        return self._worker_id

    async def __del__(self) -> None:
        if self._worker is not None:
            try:
                await self._worker.drain(self._config.drain_s)
            finally:
                await self._worker.stop()
