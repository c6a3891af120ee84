"""The Ray Serve wrapper of a prefill worker: one replica, one worker, one engine."""

import importlib
import logging
import os
import time
from typing import Any

import ray
from ray import serve

from kv_transfer import nccl_settings
from prefill_workers.config import PrefillWorkerConfig
from rpc.worker_metrics import WrapSink
from telemetry.logs import set_up_logging

_log = logging.getLogger(__name__)


class PrefillWorkerReplica:
    """Owns one worker from the replica's start to its end; no request passes through Serve."""

    _worker: Any = None  # until __init__ made it; __del__ runs after a failed one too

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, pool: str, config: PrefillWorkerConfig, wrap_sink: WrapSink
    ) -> None:
        set_up_logging()
        self._config = config
        self._worker_id = f"{pool}-{serve.get_replica_context().rank.rank}"
        nccl_settings.apply(self._config.kv_transfer, os.environ)
        if self._config.engine.num_threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self._config.engine.num_threads)
        # torch reads both when it is imported, and the worker imports it: hence only now.
        worker_class = importlib.import_module("prefill_workers.worker").PrefillWorker
        self._worker = worker_class(
            self._config,
            worker_id=self._worker_id,
            # Not the process's own start: Ray may hand us an idle process that is older than the
            # replica before this one.
            incarnation=time.time_ns() // 1000,
            node_id=ray.get_runtime_context().get_node_id(),
            wrap_sink=wrap_sink,
        )
        await self._worker.start()
        _log.info("%s serves at %s", self._worker_id, self._worker.describe().address)

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
