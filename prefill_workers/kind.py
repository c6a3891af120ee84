"""How the prefill pool's workers are found by what starts them."""

from typing import Final

from workers.kind import WorkerKind

PREFILL: Final = WorkerKind("prefill", "prefill_workers.worker", "PrefillWorker")
