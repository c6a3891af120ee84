"""Workers of both kinds inside the test's own process: real engines, real gRPC, real Gloo links."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode_workers.worker import DecodeWorker
from prefill_workers.worker import PrefillWorker
from rpc.token import create_token
from tests.cluster_processes import worker_settings
from tests.worker_client import WorkerClient
from workers.config import WorkerConfig

_INCARNATION = 1_000_000


@dataclass(slots=True)
class WorkerPair:
    """One or more workers of each kind, and a client that watches them."""

    client: WorkerClient
    prefill: list[PrefillWorker] = field(default_factory=list)
    decode: list[DecodeWorker] = field(default_factory=list)


@asynccontextmanager
async def worker_pair(
    folder: Path,
    model_path: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    both: Mapping[str, Any] | None = None,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
) -> AsyncIterator[WorkerPair]:
    """Start workers, link them, and check at the end that every pool's books are in order."""
    token_file = folder / "token"
    create_token(token_file)

    def settings(own: Mapping[str, Any] | None) -> dict[str, Any]:
        return worker_settings(model_path, token_file, {**(both or {}), **(own or {})})

    pair = WorkerPair(WorkerClient(token_file))
    try:
        for rank in range(num_prefill):
            config = WorkerConfig.from_dict(settings(prefill))
            pair.prefill.append(
                PrefillWorker(config, worker_id=f"prefill-{rank}", incarnation=_INCARNATION)
            )
        for rank in range(num_decode):
            decode_config = WorkerConfig.from_dict(settings(decode))
            pair.decode.append(
                DecodeWorker(decode_config, worker_id=f"decode-{rank}", incarnation=_INCARNATION)
            )
        for worker in (*pair.prefill, *pair.decode):
            pair.client.watch(await worker.start())
        for rank in range(num_decode):
            for peer in range(num_prefill):
                await pair.client.until_linked(f"decode-{rank}", f"prefill-{peer}")
        yield pair
        await pair.client.until_quiet(timeout_s=10.0)
        for worker in (*pair.prefill, *pair.decode):
            await worker.check_integrity()
    finally:
        await pair.client.close()
        for worker in (*pair.decode, *pair.prefill):
            await worker.stop()
