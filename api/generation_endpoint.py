"""The HTTP endpoint of every text API: read, generate, answer whole or as a stream of events."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import orjson
from opentelemetry.trace import Span
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from api.answer_writer import Answering, AnswerWriter, NewWriter
from api.call import Call
from api.caller import Caller
from api.choice_text import TextDelta, join_deltas
from api.disconnect import run_while_connected
from api.door import body_of_admitted
from api.errors import to_api_error
from api.http_body import parse_json_object, read_body
from api.merged_streams import merged
from api.openai.fields import warnings_header
from api.parameter_checks import Values
from api.request_span import describe_answer, describe_request, note_failure, request_span
from api.request_timeout import read_timeout_s
from api.serving import Serving
from api.sse import EventSender, RawHeaders
from api.text_stream import TextStream
from api.usage import server_timing
from telemetry import tracing

ReadCall = Callable[[Values, Serving], Awaitable[Call]]

_LOGGER = logging.getLogger(__name__)


class GenerationEndpoint:
    """An ASGI endpoint. Whatever ends it, its generations are closed when it returns."""

    def __init__(self, serving: Serving, read_call: ReadCall, new_writer: NewWriter) -> None:
        self._serving = serving
        self._read_call = read_call
        self._new_writer = new_writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        arrived_at = self._serving.now()
        request = Request(scope, receive)
        caller: Caller = scope["state"]["caller"]
        body = await body_of_admitted(request, caller, self._serving)
        parent = tracing.extract((key, value) for key, value in request.headers.items())
        with request_span(caller, parent) as span:
            values = await parse_json_object(await read_body(request) if body is None else body)
            await run_while_connected(receive, self._serve(values, scope, send, span, arrived_at))

    async def _serve(
        self, body: Values, scope: Scope, send: Send, span: Span, arrived_at: float
    ) -> None:
        timeout_s = read_timeout_s(Headers(scope=scope))
        call = await self._read_call(body, self._serving)
        label = scope["state"]["request_label"]
        describe_request(
            span,
            call.requests[0],
            operation=call.operation,
            model=self._serving.model_config.model_id,
            is_stream=call.is_stream,
        )
        streams = [
            self._serving.open_stream(
                request,
                request_label=label,
                caller=scope["state"]["caller"],
                arrived_at=arrived_at,
                timeout_s=timeout_s,
            )
            for request in call.requests
        ]
        writer = self._new_writer(
            Answering(
                call=call,
                streams=streams,
                model=self._serving.model_config.model_id,
                created=int(time.time()),
                token_bytes=self._serving.tokenizer.token_bytes,
            )
        )
        try:
            if call.is_stream:
                await self._answer_stream(call, writer, streams, send)
            else:
                await self._answer_whole(call, writer, streams, send)
        finally:
            for stream in streams:
                await stream.aclose()
            describe_answer(span, writer.id, streams)

    async def _answer_whole(
        self, call: Call, writer: AnswerWriter, streams: Sequence[TextStream], send: Send
    ) -> None:
        for stream in streams:
            stream.gather()
        parts: list[list[TextDelta]] = [[] for stream in streams for _ in stream.choices]
        async with aclosing(merged(streams)) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)
        answers = [join_deltas(deltas) for deltas in parts]
        choices = [answers[index] for index in _shown_indexes(streams)]
        data = orjson.dumps(writer.body(choices))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
            *_extra_headers(call, streams),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _answer_stream(
        self, call: Call, writer: AnswerWriter, streams: Sequence[TextStream], send: Send
    ) -> None:
        sender = EventSender(
            send,
            # Asked for with the first token, when there are times to tell.
            lambda: _extra_headers(call, streams),
            keep_alive_s=self._serving.config.keep_alive_s,
        )
        try:
            async with sender.kept_alive(), aclosing(merged(streams)) as deltas:
                async for index, delta in deltas:
                    await sender.write(b"".join(writer.events(index, delta)))
                await sender.write(b"".join(writer.last_events()))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Headers are gone: what is left is to say it inside the stream.
            if not sender.is_started:
                raise
            _LOGGER.warning("Stream ended by an error", exc_info=error)
            note_failure(error)
            await sender.write(writer.failure(to_api_error(error)))
        await sender.end()


def _shown_indexes(streams: Sequence[TextStream]) -> list[int]:
    """Choices to show: all in order, or the best of each prompt, the best first."""
    shown: list[int] = []
    start = 0
    for stream in streams:
        shown += [start + choice.choice_index for choice in stream.best_choices]
        start += len(stream.choices)
    return shown


def _extra_headers(call: Call, streams: Sequence[TextStream]) -> RawHeaders:
    headers: RawHeaders = []
    timing = server_timing(streams[0].report)
    if timing:
        headers.append((b"server-timing", timing.encode()))
    if call.unknown_fields:
        headers.append((b"x-relevo-warnings", warnings_header(call.unknown_fields).encode()))
    return headers
