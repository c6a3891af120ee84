"""The two kinds of worker, as what starts them knows them: by name."""

import os
from dataclasses import dataclass
from typing import Any

from kv_transfer import nccl_settings
from rpc.start_imports import import_whole
from workers import openmp
from workers.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One kind of worker; its class comes with torch, so it is named and imported late."""

    pool: str
    module: str
    class_name: str

    def import_class(self, config: WorkerConfig) -> Any:
        """The subclass of `workers.worker.Worker`, in an environment set for `config`."""
        # NCCL and OpenMP read theirs when torch is imported, and the worker imports it.
        nccl_settings.apply(config.kv_transfer, os.environ)
        openmp.apply(config.engine.num_threads, os.environ)
        return getattr(import_whole(self.module), self.class_name)
