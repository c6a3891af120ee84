"""What happens to every call on a worker's server before and after its servicer.

The caller must know the token; its trace context and request id become this task's; an exception
of the servicer becomes a status; a servicer's async generator is closed with its call, so that
its `finally` runs when the client goes away.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias, cast

import grpc
import grpc.aio

from rpc.errors import UnauthenticatedError, WorkerError
from rpc.status import to_status
from telemetry import logs, tracing

TOKEN_KEY: Final = "x-relevo-token"
REQUEST_ID_KEY: Final = "x-relevo-request-id"
_OPEN_METHODS: Final = "/grpc.health.v1.Health/"

_LOGGER = logging.getLogger(__name__)

# Generic in the stubs only, so these must stay text at run time.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"]


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without the token, except health checks."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("Got an empty token but expected the cluster's secret")
        self._token = token.encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Hand the call on, or to a handler of the same kind that refuses it."""
        if handler_call_details.method.startswith(_OPEN_METHODS):
            return await continuation(handler_call_details)
        for key, value in handler_call_details.invocation_metadata or ():
            if key == TOKEN_KEY:
                given = value if isinstance(value, bytes) else value.encode()
                if hmac.compare_digest(given, self._token):
                    return await continuation(handler_call_details)
                break
        # An unknown method is refused in the same words: they tell a stranger nothing.
        handler = await continuation(handler_call_details)
        return _like(handler, _refuse, _refuse)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Gives a call its trace context, its request id and its status."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Set the context of this call's task and wrap its servicer."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # gRPC runs each call, this method included, in a task of its own: nothing to undo.
        metadata = list(handler_call_details.invocation_metadata or ())
        tracing.attach_for_task(tracing.extract(metadata))
        for key, value in metadata:
            if key == REQUEST_ID_KEY and isinstance(value, str):
                logs.request_id.set(value)
        method = handler_call_details.method
        # Four fields, of which the one of the handler's own kind is set.
        servicer: Callable[[Any, Context], Any] = cast(
            Any,
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream,
        )

        async def respond(request: Any, context: Context) -> Any:
            try:
                return await servicer(request, context)
            except Exception as error:  # noqa: BLE001  # every one becomes a status
                return await _abort(method, error, context)

        async def respond_with_stream(request: Any, context: Context) -> None:
            try:
                result = servicer(request, context)
                if not hasattr(result, "__aiter__"):
                    await result
                    return
                async with aclosing(result) as responses:
                    async for response in responses:
                        await context.write(response)
            except Exception as error:  # noqa: BLE001  # every one becomes a status
                await _abort(method, error, context)

        return _like(handler, respond, respond_with_stream)


async def _abort(method: str, error: Exception, context: Context) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        # The client went away between two messages: nobody is left to tell.
        return
    if not isinstance(error, WorkerError | ValueError | TimeoutError):
        _LOGGER.error("%s failed", method, exc_info=error)
    await context.abort(*to_status(error))


async def _refuse(_request: Any, context: Context) -> None:
    await context.abort(*to_status(UnauthenticatedError("the cluster's token is missing or wrong")))


def _like(
    handler: "Handler | None",
    respond: Callable[[Any, Context], Awaitable[Any]],
    respond_with_stream: Callable[[Any, Context], Awaitable[None]],
) -> Handler:
    """Make a handler of the same kind and with the same (de)serialisers as `handler`."""
    makers: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    if handler is None:
        refusal: Handler = grpc.unary_unary_rpc_method_handler(respond)
        return refusal
    make = makers[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: Handler = make(
        respond_with_stream if handler.response_streaming else respond,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return made
