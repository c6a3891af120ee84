"""How the decode pool's workers are found by what starts them."""

from typing import Final

from workers.kind import WorkerKind

DECODE: Final = WorkerKind("decode", "decode_workers.worker", "DecodeWorker")
