"""relevo.v1.InferenceService: the same requests and verdicts as over HTTP."""

import asyncio
from typing import Any

import grpc
import grpc.aio
from relevo.v1 import inference_pb2, inference_pb2_grpc

from api.choice_text import TextDelta
from api.errors import invalid
from api.generation_request import GenerationRequest, read_model, validate
from api.grpc_chat import GrpcChat
from api.grpc_fields import FINISH_REASONS, read_fields
from api.grpc_gate import caller
from api.grpc_run import GrpcRun, prompt_scored, scored
from api.parameter_checks import read_token_ids
from api.serving import Serving
from api.text_stream import TextStream
from api.usage import Usage, served_by
from telemetry import attributes

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The gRPC face. Errors are raised; the gate turns them into statuses."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._chat = GrpcChat(serving)

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """Return a whole completion."""
        run = self._run(request.generation, context)
        return self._whole(
            *await run.whole(lambda: self._read(request.generation, is_stream=False))
        )

    def _whole(
        self, stream: TextStream, answers: list[TextDelta]
    ) -> inference_pb2.GenerateResponse:
        first = answers[0]
        response = inference_pb2.GenerateResponse(
            request_id=stream.request_id,
            model=self._serving.model_config.model_id,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=FINISH_REASONS[first.finish_reason],
            usage=Usage.of([stream]).to_proto(),
            logprobs=scored(first, self._serving),
            prompt_logprobs=prompt_scored(stream, first, self._serving),
            served_by=served_by(stream),
        )
        if len(answers) > 1:
            for index, answer in enumerate(answers):
                response.choices.add(
                    index=index,
                    text=answer.text,
                    token_ids=answer.token_ids,
                    finish_reason=FINISH_REASONS[answer.finish_reason],
                    logprobs=scored(answer, self._serving),
                )
        return response

    async def GenerateStream(  # noqa: N802
        self, request: inference_pb2.GenerateStreamRequest, context: Context
    ) -> None:
        """Send a completion step by step."""
        run = self._run(request.generation, context)

        async def take(stream: TextStream, delta: TextDelta) -> None:
            message = inference_pb2.GenerateStreamResponse(
                request_id=stream.request_id,
                model=self._serving.model_config.model_id,
                text=delta.text,
                token_ids=delta.token_ids,
                choice_index=delta.choice_index,
            )
            # What is left out costs nothing, and nearly all messages have none of it.
            if delta.finish_reason is not None:
                message.finish_reason = FINISH_REASONS[delta.finish_reason]
            if delta.scored:
                message.logprobs.extend(scored(delta, self._serving))
            if delta.prompt_logprobs:
                message.prompt_logprobs.extend(prompt_scored(stream, delta, self._serving))
            if stream.is_finished:
                message.usage.CopyFrom(Usage.of([stream]).to_proto())
                message.served_by.CopyFrom(served_by(stream))
            await run.write(message)

        await run.stream(lambda: self._read(request.generation, is_stream=True), take)

    async def Chat(  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> inference_pb2.ChatResponse:
        """Return the answer to a chat."""
        return await self._chat.answer(request.chat, context)

    async def ChatStream(  # noqa: N802
        self, request: inference_pb2.ChatStreamRequest, context: Context
    ) -> None:
        """Send the answer to a chat step by step."""
        await self._chat.send(request.chat, context)

    def _run(self, generation: inference_pb2.Generation, context: Context) -> GrpcRun:
        return GrpcRun(
            self._serving,
            context,
            operation=attributes.OPERATION_TEXT_COMPLETION,
            priority=generation.priority,
        )

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
        is_whole = kind == "text" and not generation.HasField("truncate_prompt_tokens")
        return self._serving.lay_out_echo(request, generation.text if is_whole else None)

    async def Tokenize(  # noqa: N802
        self,
        request: inference_pb2.TokenizeRequest,
        context: Context,  # noqa: ARG002
    ) -> inference_pb2.TokenizeResponse:
        """Return the ids a prompt would have."""
        self._check_named_model(request.model)
        max_model_len = self._serving.limits().max_model_len
        if not request.HasField("chat"):
            token_ids = await self._serving.tokenizer.encode(
                request.text, max_model_len=max_model_len
            )
        elif request.text:
            raise invalid("Give either text or chat", "text")
        else:
            token_ids = await self._chat.tokenize(request.chat)
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
        caller.get().check_operator()
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
            info.max_num_seqs = announced.max_num_seqs
        return info
