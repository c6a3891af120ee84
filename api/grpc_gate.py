"""The door of the public gRPC server: keys, labels, trace context, and every error as a status."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from api.api_keys import ApiKeys
from api.caller import Caller
from api.errors import Verdict, invalid, to_api_error
from api.grpc_errors import status_metadata
from api.http_gate import read_label
from telemetry import logs, tracing

_OPEN_METHODS = "/grpc.health.v1.Health/"
_LOGGER = logging.getLogger(__name__)

# The client's x-request-id, or ours; set for each call's own task.
request_label: ContextVar[str] = ContextVar("request_label", default="")
caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - frozen

# Quoted: generic in the type stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Context = grpc.aio.ServicerContext[Any, Any]
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[MaybeHandler]]"
Metadata = Iterable[tuple[str, str | bytes]]


class GrpcGate(grpc.aio.ServerInterceptor):
    """Wraps every call. Invariant: without a key only grpc.health.v1 answers."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> MaybeHandler:
        """Judge the key, set the context of the call's task and wrap its servicer."""
        metadata = list(handler_call_details.invocation_metadata or ())
        label = read_label(_values(metadata, "x-request-id"))
        handler = await continuation(handler_call_details)
        if not handler_call_details.method.startswith(_OPEN_METHODS):
            try:
                who = self._keys.admit(
                    _values(metadata, "authorization"),
                    session_id="".join(_values(metadata, "x-session-id")[:1]),
                )
                caller.set(who)
            except Exception as error:  # noqa: BLE001
                return _refusal(handler, error, label)
        if handler is None:
            return None
        # gRPC runs each call, this method included, in a task of its own: nothing to undo.
        request_label.set(label)
        logs.request_id.set(label)
        tracing.attach_for_task(tracing.extract(metadata))
        return _guarded(handler, label)


def _guarded(handler: Handler, label: str) -> Handler:
    """Turn every exception of the servicer into a status."""
    # Of the four fields the one of the handler's own kind is set.
    servicer: Callable[[Any, Context], Any] = cast(
        Any,
        handler.unary_unary
        or handler.unary_stream
        or handler.stream_unary
        or handler.stream_stream,
    )

    async def respond(data: Any, context: Context) -> Any:
        try:
            return await servicer(_parsed(handler, data), context)
        except Exception as error:  # noqa: BLE001
            return await _abort(error, context, label)

    async def respond_with_stream(data: Any, context: Context) -> None:
        try:
            result = servicer(_parsed(handler, data), context)
            if not hasattr(result, "__aiter__"):
                await result
                return
            async for response in result:
                await context.write(response)
        except Exception as error:  # noqa: BLE001
            await _abort(error, context, label)

    return _like(handler, respond_with_stream if handler.response_streaming else respond)


def _parsed(handler: Handler, data: Any) -> Any:
    """Read a request here: what gRPC cannot read it answers with UNKNOWN and a traceback."""
    if handler.request_streaming or handler.request_deserializer is None:
        return data
    try:
        return handler.request_deserializer(data)
    except DecodeError:
        raise invalid("The message cannot be read: it is not the request of this method") from None


def _refusal(handler: MaybeHandler, error: Exception, label: str) -> Handler:
    async def refuse(_request: Any, context: Context) -> None:
        await _abort(error, context, label)

    if handler is None:
        # An unknown method is refused in the same words: they tell a stranger nothing.
        return grpc.unary_unary_rpc_method_handler(refuse)
    return _like(handler, refuse)


async def _abort(error: Exception, context: Context, label: str) -> None:
    if isinstance(error, grpc.aio.BaseError):
        # The servicer's own abort, or the call is over already.
        raise error
    verdict = to_api_error(error)
    if verdict.verdict is Verdict.FAILED:
        _LOGGER.error("Call failed", exc_info=error)
    await context.abort(verdict.face.grpc_code, verdict.message, status_metadata(verdict, label))


def _like(handler: Handler, respond: Callable[[Any, Context], Awaitable[Any]]) -> Handler:
    """Make a handler of the same kind; a lone request comes to it unread."""
    makers: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[bool(handler.request_streaming), bool(handler.response_streaming)]
    return cast(
        Handler,
        make(
            respond,
            request_deserializer=handler.request_deserializer
            if handler.request_streaming
            else None,
            response_serializer=handler.response_serializer,
        ),
    )


def _values(metadata: Metadata, name: str) -> list[str]:
    return [
        value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")
        for key, value in metadata
        if key == name
    ]
