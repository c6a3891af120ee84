"""A router for tests of the faces: scripted tokens, recorded requests, no workers."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from relevo.v1 import common_pb2, state_pb2

from router.errors import QueueFull
from router.report import RequestReport
from router.request import FinishReason, LoadReport, ModelInfo, RoutedRequest, Tenant, TokenBatch
from tests.tiny_tokenizer import EOS_TOKEN_ID

Step = TokenBatch | Exception


class FakeGeneration:
    """Plays a script of batches and exceptions; after the last it hangs until closed."""

    def __init__(
        self,
        request: RoutedRequest,
        script: Sequence[Step],
        *,
        step_s: float,
        may_go_on: asyncio.Event | None = None,
    ) -> None:
        self.request = request
        self.is_closed = False
        self.close_reason: FinishReason | None = None
        self.closed = asyncio.Event()
        self.ended_choices: list[int] = []
        self.num_gathered = 1
        self._script = list(script)
        self._step_s = step_s
        self._may_go_on = may_go_on
        self._num_tokens = 0

    @property
    def report(self) -> RequestReport:
        has_token = self._num_tokens > 0
        return RequestReport(
            request_id=self.request.request_id,
            num_prompt_tokens=len(self.request.token_ids),
            num_completion_tokens=self._num_tokens,
            cached_prefill=2,
            computed=len(self.request.token_ids) - 2,
            queue_s=0.001,
            route_s=0.0005,
            prefill_wait_s=0.002,
            prefill_s=0.1 / 3,
            wire_s=0.0001,
            first_token_s=0.0369 if has_token else None,
            kv_transfer_s=0.004,
            completion_s=0.1 / 7 if has_token else 0.0,
            prefill_worker_id="prefill-0",
            decode_worker_id="decode-0",
        )

    def __aiter__(self) -> "FakeGeneration":
        return self

    async def __anext__(self) -> TokenBatch:
        if self.is_closed:
            raise StopAsyncIteration
        await asyncio.sleep(self._step_s)
        if self._may_go_on is not None:
            await self._may_go_on.wait()
        if not self._script:
            await self.closed.wait()
            raise StopAsyncIteration
        step = self._script.pop(0)
        if isinstance(step, Exception):
            raise step
        self._num_tokens += len(step.token_ids)
        return dataclasses.replace(step)

    def gather(self, num_tokens: int) -> None:
        self.num_gathered = num_tokens

    def end_choice(self, choice_index: int) -> None:
        self.ended_choices.append(choice_index)
        self._script = [
            step
            for step in self._script
            if isinstance(step, Exception) or step.choice_index != choice_index
        ]

    async def aclose(self, finish_reason: FinishReason | None = None) -> None:
        if not self.is_closed:
            self.close_reason = finish_reason
        self.is_closed = True
        self.closed.set()


class FakeRouter:
    """Answers every request by `script(request)`."""

    def __init__(self, *, model_id: str = "tiny", max_model_len: int = 256) -> None:
        self.model: ModelInfo | None = ModelInfo(
            model_id=model_id,
            model_revision="main",
            dtype="float32",
            max_model_len=max_model_len,
            block_size=32,
            max_num_seqs=16,
            eos_token_ids=(EOS_TOKEN_ID,),
        )
        self.ready = True
        self.reasons: list[str] = []
        self.workers: list[dict[str, object]] = []
        self.num_waiting = 0
        self.places = 1024
        self.is_full: Callable[[Tenant, int], bool] = lambda tenant, priority: False
        self.step_s = 0.0
        self.may_go_on = asyncio.Event()  # cleared: no generation says anything more
        self.may_go_on.set()
        self.started = asyncio.Event()
        self.generations: list[FakeGeneration] = []
        self.script: Callable[[RoutedRequest], Sequence[Step]] = lambda _: [
            TokenBatch([], FinishReason.STOP)
        ]

    def generate(self, request: RoutedRequest) -> FakeGeneration:
        generation = FakeGeneration(
            request, self.script(request), step_s=self.step_s, may_go_on=self.may_go_on
        )
        self.generations.append(generation)
        self.started.set()
        return generation

    def has_room(self, tenant: Tenant, priority: int) -> bool:
        return not self.is_full(tenant, priority)

    def check_room(self, tenant: Tenant, priority: int) -> None:
        if self.is_full(tenant, priority):
            raise QueueFull("the queue is full", 7.0)

    def max_requests(self, num_choices: int) -> int:
        return self.places // num_choices

    def is_ready(self) -> bool:
        return self.ready

    def loads(self) -> list[LoadReport]:
        load = state_pb2.WorkerLoad(
            state="ready",
            num_running=len([each for each in self.generations if not each.is_closed]),
            blocks=state_pb2.BlockCounts(free=10, total=10),
            metrics=[
                state_pb2.MetricSample(
                    name="relevo_requests_running",
                    labels={"pool": "decode", "worker": "decode-0"},
                    value=3,
                )
            ],
        )
        worker = common_pb2.WorkerRef(worker_id="decode-0", incarnation=7)
        return [LoadReport(worker=worker, pool="decode", load=load)]

    def status(self, num_routes: int = 0, *, tenant: str | None = None) -> dict[str, object]:
        body: dict[str, object] = {
            "state": "ready" if self.ready else "starting",
            "reasons": list(self.reasons),
            "workers": list(self.workers),
        }
        if num_routes:
            body["routes"] = [{"number": number, "of": tenant} for number in range(num_routes)]
        return body
