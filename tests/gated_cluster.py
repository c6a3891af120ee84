"""A whole relay in the test's own process, each worker behind a gate: faults at a chosen token.

Real engines, real gRPC, real links, HTTP and gRPC in front. A strike is called in the moment a
worker is about to tell something to the router, and can close that worker's gate before it does.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio
import httpx
from relevo.v1 import decode_pb2, inference_pb2_grpc, prefill_pb2

import decode_workers.worker as decode_module
import prefill_workers.worker as prefill_module
from api.ingress import Ingress
from decode_workers.service import DecodeService
from decode_workers.worker import DecodeWorker
from prefill_workers.service import PrefillService
from prefill_workers.worker import PrefillWorker
from router.config import RouterConfig
from rpc.description import WorkerDescription
from rpc.token import create_token
from tests.cluster_processes import worker_settings
from tests.gate import Gate
from tests.patience import comes_true
from tests.relay import open_ingress
from workers.config import WorkerConfig

FIRST_INCARNATION = 2_000_000


@dataclass(frozen=True, slots=True)
class Moment:
    """A worker is about to tell something."""

    worker_id: str
    label: str  # the request's
    choice_index: int
    offset: int  # of the last token told, from the start of the output; -1: none
    is_end: bool


Strike = Callable[[Moment], None]


def _nobody(_moment: Moment) -> None:
    """The strike of undisturbed runs."""


@dataclass(slots=True)
class GatedCluster:
    """Workers by id, their gates, and clients of the ingress in front of them."""

    ingress: Ingress
    http: httpx.AsyncClient
    stub: inference_pb2_grpc.InferenceServiceStub
    gates: dict[str, Gate]
    strikes: "Strikes"
    workers: dict[str, PrefillWorker | DecodeWorker]

    async def until_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until every worker and every link serves."""
        await self.until(self._is_whole, timeout_s)

    async def until_quiet(self, timeout_s: float = 5.0) -> None:
        """Wait until nothing runs anywhere and no block is used, held or quarantined."""
        await self.until(self._is_quiet, timeout_s)
        for worker in self.workers.values():
            await worker.check_integrity()

    async def until(self, is_true: Callable[[], bool], timeout_s: float) -> None:
        if not await comes_true(is_true, timeout_s):
            raise AssertionError(f"not within {timeout_s} s: {self.upstream.status()}")

    @property
    def upstream(self) -> Any:
        return self.ingress.serving.upstream

    def _is_whole(self) -> bool:
        return bool(self.upstream.status()["state"] == "ready") and len(
            self.upstream.loads()
        ) == len(self.workers)

    def _is_quiet(self) -> bool:
        loads = [report.load for report in self.upstream.loads()]
        return len(loads) == len(self.workers) and not any(
            load.num_running
            or load.num_waiting
            or load.num_transferring
            or load.blocks.used
            or load.blocks.held
            or load.blocks.quarantined
            for load in loads
        )


@dataclass(slots=True)
class Strikes:
    """What happens when; tests set `strike`."""

    strike: Strike = _nobody
    names: dict[int, str] = field(default_factory=dict)  # incarnation -> worker id

    def services(self) -> tuple[type[DecodeService], type[PrefillService]]:
        """Services that ask here before they tell anything."""
        strikes = self

        class StruckDecode(DecodeService):
            async def Decode(  # noqa: N802
                self, request: decode_pb2.DecodeRequest, context: Any
            ) -> AsyncIterator[decode_pb2.DecodeResponse]:
                async for response in super().Decode(request, context):
                    strikes.visit(request.decode_incarnation, request.request, response)
                    yield response

        class StruckPrefill(PrefillService):
            async def Prefill(  # noqa: N802
                self, request: prefill_pb2.PrefillRequest, context: Any
            ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
                async for response in super().Prefill(request, context):
                    strikes.visit(request.prefill_incarnation, request.request, response)
                    yield response

        return StruckDecode, StruckPrefill

    def visit(self, incarnation: int, request: Any, response: Any) -> None:
        has_tokens = response.WhichOneof("message") == "tokens" and response.tokens.token_ids
        tokens = response.tokens
        offset = -1
        if has_tokens:
            offset = tokens.start_position + len(tokens.token_ids) - 1 - request.num_prompt_tokens
        self.strike(
            Moment(
                worker_id=self.names[incarnation],
                label=request.request_label,
                choice_index=tokens.choice_index,
                offset=offset,
                is_end=bool(tokens.finish_reason),
            )
        )


@asynccontextmanager
async def gated_cluster(
    folder: Path,
    model_path: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 2,
    router: RouterConfig | None = None,
    engine: dict[str, Any] | None = None,
) -> AsyncIterator[GatedCluster]:
    """Start everything, wait until it serves, and take it down."""
    token_file = folder / "token"
    create_token(token_file)
    settings = worker_settings(model_path, token_file, {"engine": engine or {}})
    strikes, gates = Strikes(), {}
    workers: dict[str, PrefillWorker | DecodeWorker] = {}
    descriptions: list[WorkerDescription] = []
    struck_decode, struck_prefill = strikes.services()
    try:
        with (
            mock.patch.object(decode_module, "DecodeService", struck_decode),
            mock.patch.object(prefill_module, "PrefillService", struck_prefill),
        ):
            for worker in _make(settings, num_prefill, num_decode):
                described = await worker.start()
                name = described.worker_id
                workers[name] = worker
                gates[name] = Gate(described.address)
                strikes.names[described.incarnation] = name
                descriptions.append(replace(described, address=await gates[name].start()))
        config = router or RouterConfig(local_prefill="never")
        opening = open_ingress(descriptions, config, model_path=model_path, token_file=token_file)
        async with opening as ingress:
            url = f"http://127.0.0.1:{ingress.http_port}"
            limits = httpx.Limits(max_connections=None)
            async with (
                httpx.AsyncClient(base_url=url, timeout=60, verify=False, limits=limits) as http,
                grpc.aio.insecure_channel(f"127.0.0.1:{ingress.grpc_port}") as channel,
            ):
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                cluster = GatedCluster(ingress, http, stub, gates, strikes, workers)
                await cluster.until_ready()
                yield cluster
    finally:
        for gate in gates.values():
            await gate.stop()
        for worker in reversed(workers.values()):
            await worker.stop()


def _make(
    settings: dict[str, Any], num_prefill: int, num_decode: int
) -> list[PrefillWorker | DecodeWorker]:
    prefill = WorkerConfig.from_dict(settings)
    decode = WorkerConfig.from_dict(settings)
    made: list[PrefillWorker | DecodeWorker] = [
        PrefillWorker(prefill, worker_id=f"prefill-{n}", incarnation=FIRST_INCARNATION + n)
        for n in range(num_prefill)
    ]
    return made + [
        DecodeWorker(decode, worker_id=f"decode-{n}", incarnation=FIRST_INCARNATION + 100 + n)
        for n in range(num_decode)
    ]
