"""relevo.v1.InferenceService: the same requests and verdicts as over HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from relevo.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from api.choice_text import TextDelta, join_deltas
from api.errors import ApiError, Verdict, invalid
from api.generation_request import GenerationRequest, read_model, validate
from api.grpc_fields import read_fields
from api.grpc_gate import caller, request_label
from api.grpc_logprobs import to_message
from api.parameter_checks import read_token_ids
from api.request_span import describe_answer, describe_request, request_span
from api.serving import Serving
from api.text_stream import TextStream
from api.usage import Usage
from router.request import FinishReason
from telemetry import attributes

Context = grpc.aio.ServicerContext[Any, Any]

_FINISH_REASONS = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The gRPC face. Errors are raised; the gate turns them into statuses."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """Return a whole completion."""
        answered: TextStream | None = None
        parts: dict[int, list[TextDelta]] = {}

        async def take(stream: TextStream, delta: TextDelta) -> None:
            nonlocal answered
            answered = stream
            parts.setdefault(delta.choice_index, []).append(delta)

        await self._run(request.generation, context, take, is_stream=False)
        assert answered is not None, "a generation ends in a delta or in an error"
        answers = [join_deltas(parts[choice.choice_index]) for choice in answered.best_choices]
        await _send_label(context)
        return self._whole(answered, answers)

    def _whole(
        self, stream: TextStream, answers: list[TextDelta]
    ) -> inference_pb2.GenerateResponse:
        first = answers[0]
        response = inference_pb2.GenerateResponse(
            request_id=stream.request_id,
            model=self._serving.model_config.model_id,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=_FINISH_REASONS[first.finish_reason],
            usage=Usage.of([stream]).to_proto(),
            logprobs=self._scored(first),
            prompt_logprobs=self._prompt_scored(stream, first),
        )
        if len(answers) > 1:
            for index, answer in enumerate(answers):
                response.choices.add(
                    index=index,
                    text=answer.text,
                    token_ids=answer.token_ids,
                    finish_reason=_FINISH_REASONS[answer.finish_reason],
                    logprobs=self._scored(answer),
                )
        return response

    async def GenerateStream(  # noqa: N802
        self, request: inference_pb2.GenerateStreamRequest, context: Context
    ) -> None:
        """Send a completion step by step; nothing before the first token, so refusals are clean."""
        has_sent = False

        async def take(stream: TextStream, delta: TextDelta) -> None:
            nonlocal has_sent
            if not has_sent:
                has_sent = True
                await _send_label(context)
            message = inference_pb2.GenerateStreamResponse(
                request_id=stream.request_id,
                model=self._serving.model_config.model_id,
                text=delta.text,
                token_ids=delta.token_ids,
                finish_reason=_FINISH_REASONS[delta.finish_reason],
                logprobs=self._scored(delta),
                prompt_logprobs=self._prompt_scored(stream, delta),
                choice_index=delta.choice_index,
            )
            if stream.is_finished:
                message.usage.CopyFrom(Usage.of([stream]).to_proto())
            await self._write(message, context)

        await self._run(request.generation, context, take, is_stream=True)

    async def _write(self, message: inference_pb2.GenerateStreamResponse, context: Context) -> None:
        """Send it; ApiError when the client makes no room for it."""
        try:
            async with asyncio.timeout(self._serving.config.stalled_reader_s):
                await context.write(message)
        except TimeoutError:
            raise ApiError(Verdict.CANCELLED, "The client stopped reading") from None

    async def _run(
        self,
        generation: inference_pb2.Generation,
        context: Context,
        take: Callable[[TextStream, TextDelta], Awaitable[None]],
        *,
        is_stream: bool,
    ) -> None:
        arrived_at, timeout_s = self._serving.now(), context.time_remaining()
        label = request_label.get()
        model = self._serving.model_config.model_id
        with request_span() as span:
            request = await self._read(generation, is_stream=is_stream)
            operation = attributes.OPERATION_TEXT_COMPLETION
            describe_request(span, request, operation=operation, model=model, is_stream=is_stream)
            stream = self._serving.open_stream(
                request,
                request_label=label,
                caller=caller.get(),
                arrived_at=arrived_at,
                timeout_s=timeout_s,
            )
            try:
                async for delta in stream:
                    await take(stream, delta)
            finally:
                await stream.aclose()
                describe_answer(span, stream.request_id, [stream])

    async def _read(
        self, generation: inference_pb2.Generation, *, is_stream: bool
    ) -> GenerationRequest:
        """Judge a request exactly as one that came over HTTP."""
        values = read_fields(generation) | {"stream": is_stream}
        read_model(values, served_model=self._serving.model_config.model_id)
        kind = generation.WhichOneof("prompt")
        if kind is None:
            raise invalid("prompt is required: text or token_ids", "prompt")
        limits = self._serving.limits()
        if kind == "text":
            token_ids = await self._serving.tokenizer.encode(
                generation.text, max_model_len=limits.max_model_len
            )
        else:
            token_ids = read_token_ids(
                list(generation.token_ids.ids),
                "prompt",
                vocab_size=limits.vocab_size,
                max_ids=limits.max_model_len,
            )
        request = validate(values, token_ids=token_ids, limits=limits)
        await self._serving.check_grammar(request)
        return self._serving.lay_out_echo(request, generation.text if kind == "text" else None)

    def _scored(self, delta: TextDelta) -> list[inference_pb2.TokenLogprobs]:
        token_bytes = self._serving.tokenizer.token_bytes
        return [to_message(token.token_id, token.logprobs, token_bytes) for token in delta.scored]

    def _prompt_scored(
        self, stream: TextStream, delta: TextDelta
    ) -> list[inference_pb2.TokenLogprobs]:
        token_bytes = self._serving.tokenizer.token_bytes
        pairs = zip(stream.prompt[1:], delta.prompt_logprobs, strict=False)
        return [to_message(token_id, entry, token_bytes) for token_id, entry in pairs]

    async def Tokenize(  # noqa: N802
        self,
        request: inference_pb2.TokenizeRequest,
        context: Context,  # noqa: ARG002
    ) -> inference_pb2.TokenizeResponse:
        """Return the ids a prompt would have."""
        self._check_named_model(request.model)
        max_model_len = self._serving.limits().max_model_len
        token_ids = await self._serving.tokenizer.encode(request.text, max_model_len=max_model_len)
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def Detokenize(  # noqa: N802
        self,
        request: inference_pb2.DetokenizeRequest,
        context: Context,  # noqa: ARG002
    ) -> inference_pb2.DetokenizeResponse:
        """Return the text of ids."""
        self._check_named_model(request.model)
        limits = self._serving.limits()
        token_ids = read_token_ids(
            list(request.token_ids),
            "tokens",
            vocab_size=limits.vocab_size,
            max_ids=limits.max_model_len,
        )
        text = await asyncio.to_thread(self._serving.tokenizer.detokenize, token_ids)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.ListModelsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> inference_pb2.ListModelsResponse:
        """Return the one model."""
        return inference_pb2.ListModelsResponse(models=[self._model_info()])

    async def GetModelInfo(  # noqa: N802
        self,
        request: inference_pb2.GetModelInfoRequest,
        context: Context,  # noqa: ARG002
    ) -> inference_pb2.GetModelInfoResponse:
        """Return the one model by its name, or without one."""
        self._check_named_model(request.model)
        return inference_pb2.GetModelInfoResponse(model_info=self._model_info())

    async def GetLoad(  # noqa: N802
        self,
        request: inference_pb2.GetLoadRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> inference_pb2.GetLoadResponse:
        """Return the last load of every live worker."""
        return inference_pb2.GetLoadResponse(
            workers=[
                inference_pb2.GetLoadResponse.Worker(
                    worker=report.worker, pool=report.pool, load=report.load
                )
                for report in self._serving.upstream.loads()
            ]
        )

    async def Abort(  # noqa: N802
        self,
        request: inference_pb2.AbortRequest,
        context: Context,  # noqa: ARG002
    ) -> inference_pb2.AbortResponse:
        """End a running request."""
        return inference_pb2.AbortResponse(
            aborted=self._serving.abort(request.request_id, caller=caller.get())
        )

    def _check_named_model(self, model: str) -> None:
        if model:
            read_model({"model": model}, served_model=self._serving.model_config.model_id)

    def _model_info(self) -> inference_pb2.ModelInfo:
        info = inference_pb2.ModelInfo(
            model=self._serving.model_config.model_id,
            revision=self._serving.model_config.revision,
            vocab_size=self._serving.tokenizer.vocab_size,
        )
        announced = self._serving.upstream.model
        if announced is not None:
            info.dtype = announced.dtype
            info.max_model_len = announced.max_model_len
            info.block_size = announced.block_size
        return info


async def _send_label(context: Context) -> None:
    await context.send_initial_metadata((("x-request-id", request_label.get()),))
