"""Runs one generation for a call of the gRPC face, whole or streamed."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from google.protobuf.message import Message
from relevo.v1 import inference_pb2

from api.choice_text import TextDelta, join_deltas
from api.generation_request import GenerationRequest
from api.grpc_gate import caller, request_label
from api.grpc_logprobs import to_message
from api.request_span import describe_answer, describe_request, request_span
from api.serving import Serving
from api.stall_guard import StallGuard
from api.text_stream import TextStream

Context = grpc.aio.ServicerContext[Any, Any]
Read = Callable[[], Awaitable[GenerationRequest]]
Take = Callable[[TextStream, TextDelta], Awaitable[None]]


class GrpcRun:
    """One call. Whatever ends it, its generation is closed when `stream` or `whole` returns."""

    def __init__(
        self, serving: Serving, context: Context, *, operation: str, priority: int
    ) -> None:
        """QueueFull when there is no room for a request of this priority."""
        serving.check_room(caller.get(), priority)
        self._serving = serving
        self._context = context
        self._operation = operation
        self._guard: StallGuard | None = None  # of a stream

    async def whole(self, read: Read) -> tuple[TextStream, list[TextDelta]]:
        """Return the finished stream and its answers, those to be shown."""
        answered: TextStream | None = None
        parts: dict[int, list[TextDelta]] = {}

        async def take(stream: TextStream, delta: TextDelta) -> None:
            nonlocal answered
            answered = stream
            parts.setdefault(delta.choice_index, []).append(delta)

        await self._run(read, take, is_stream=False)
        assert answered is not None, "a generation ends in a delta or in an error"
        await self._send_label()
        return answered, [
            join_deltas(parts[choice.choice_index]) for choice in answered.best_choices
        ]

    async def stream(self, read: Read, take: Take) -> None:
        """Hand on each delta; nothing is sent before the first, so refusals are clean."""
        has_sent = False

        async def send(stream: TextStream, delta: TextDelta) -> None:
            nonlocal has_sent
            if not has_sent:
                has_sent = True
                await self._send_label()
            await take(stream, delta)

        with StallGuard(self._serving.config.stalled_reader_s) as self._guard:
            await self._run(read, send, is_stream=True)

    async def write(self, message: Message) -> None:
        """Send it; the stream ends when the client makes no room for it."""
        assert self._guard is not None, "messages are written while the stream runs"
        await self._guard.watch(self._context.write(message))

    async def _run(self, read: Read, take: Take, *, is_stream: bool) -> None:
        arrived_at, timeout_s = self._serving.now(), self._context.time_remaining()
        label, model = request_label.get(), self._serving.model_config.model_id
        with request_span(caller.get()) as span:
            request = await read()
            describe_request(
                span, request, operation=self._operation, model=model, is_stream=is_stream
            )
            stream = self._serving.open_stream(
                request,
                request_label=label,
                caller=caller.get(),
                arrived_at=arrived_at,
                timeout_s=timeout_s,
            )
            if not is_stream:
                stream.gather()
            try:
                async for delta in stream:
                    await take(stream, delta)
            finally:
                await stream.aclose()
                describe_answer(span, stream.request_id, [stream])

    async def _send_label(self) -> None:
        await self._context.send_initial_metadata((("x-request-id", request_label.get()),))


def scored(delta: TextDelta, serving: Serving) -> list[inference_pb2.TokenLogprobs]:
    """Logprobs of the tokens of a delta."""
    if not delta.scored:
        return []  # of nearly all deltas
    token_bytes = serving.tokenizer.token_bytes
    return [to_message(token.token_id, token.logprobs, token_bytes) for token in delta.scored]


def prompt_scored(
    stream: TextStream, delta: TextDelta, serving: Serving
) -> list[inference_pb2.TokenLogprobs]:
    """Logprobs of the prompt's tokens, in the delta that has them."""
    if not delta.prompt_logprobs:
        return []  # of nearly all; a prompt is not to be copied for each
    token_bytes = serving.tokenizer.token_bytes
    pairs = zip(stream.prompt[1:], delta.prompt_logprobs, strict=False)
    return [to_message(token_id, entry, token_bytes) for token_id, entry in pairs]
