"""Every way a request can be refused or fail, once, for HTTP and gRPC alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import grpc

from router import errors as router_errors

MAX_MESSAGE_CHARACTERS = 1024
MAX_ECHO_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """How one verdict looks from outside."""

    http_status: int
    grpc_code: grpc.StatusCode
    type: str  # OpenAI's error.type
    anthropic_type: str
    code: str  # OpenAI's error.code and google.rpc ErrorInfo.reason


class Verdict(Enum):
    """The whole table of outcomes; a new kind of failure gets a new row."""

    INVALID = Face(
        http_status=400,
        grpc_code=grpc.StatusCode.INVALID_ARGUMENT,
        type="invalid_request_error",
        anthropic_type="invalid_request_error",
        code="invalid_value",
    )
    CONTEXT_LENGTH = Face(
        http_status=400,
        grpc_code=grpc.StatusCode.INVALID_ARGUMENT,
        type="invalid_request_error",
        anthropic_type="invalid_request_error",
        code="context_length_exceeded",
    )
    UNSUPPORTED = Face(
        http_status=400,
        grpc_code=grpc.StatusCode.INVALID_ARGUMENT,
        type="invalid_request_error",
        anthropic_type="invalid_request_error",
        code="unsupported_parameter",
    )
    UNAUTHENTICATED = Face(
        http_status=401,
        grpc_code=grpc.StatusCode.UNAUTHENTICATED,
        type="authentication_error",
        anthropic_type="authentication_error",
        code="invalid_api_key",
    )
    FORBIDDEN = Face(
        http_status=403,
        grpc_code=grpc.StatusCode.PERMISSION_DENIED,
        type="permission_error",
        anthropic_type="permission_error",
        code="operators_only",
    )
    MODEL_NOT_FOUND = Face(
        http_status=404,
        grpc_code=grpc.StatusCode.NOT_FOUND,
        type="invalid_request_error",
        anthropic_type="not_found_error",
        code="model_not_found",
    )
    ROUTE_NOT_FOUND = Face(
        http_status=404,
        grpc_code=grpc.StatusCode.UNIMPLEMENTED,
        type="invalid_request_error",
        anthropic_type="not_found_error",
        code="route_not_found",
    )
    METHOD_NOT_ALLOWED = Face(
        http_status=405,
        grpc_code=grpc.StatusCode.UNIMPLEMENTED,
        type="invalid_request_error",
        anthropic_type="invalid_request_error",
        code="method_not_allowed",
    )
    BODY_TOO_LARGE = Face(
        http_status=413,
        grpc_code=grpc.StatusCode.INVALID_ARGUMENT,
        type="invalid_request_error",
        anthropic_type="request_too_large",
        code="body_too_large",
    )
    HEADERS_TOO_LARGE = Face(
        http_status=431,
        grpc_code=grpc.StatusCode.INVALID_ARGUMENT,
        type="invalid_request_error",
        anthropic_type="request_too_large",
        code="headers_too_large",
    )
    QUEUE_FULL = Face(
        http_status=429,
        grpc_code=grpc.StatusCode.RESOURCE_EXHAUSTED,
        type="rate_limit_error",
        anthropic_type="rate_limit_error",
        code="queue_full",
    )
    QUOTA_EXCEEDED = Face(
        http_status=429,
        grpc_code=grpc.StatusCode.RESOURCE_EXHAUSTED,
        type="rate_limit_error",
        anthropic_type="rate_limit_error",
        code="rate_limit_exceeded",
    )
    CANCELLED = Face(
        http_status=499,
        grpc_code=grpc.StatusCode.CANCELLED,
        type="cancelled_error",
        anthropic_type="api_error",
        code="request_cancelled",
    )
    FAILED = Face(
        http_status=500,
        grpc_code=grpc.StatusCode.INTERNAL,
        type="server_error",
        anthropic_type="api_error",
        code="internal_error",
    )
    UNAVAILABLE = Face(
        http_status=503,
        grpc_code=grpc.StatusCode.UNAVAILABLE,
        type="service_unavailable_error",
        anthropic_type="overloaded_error",
        code="no_workers",
    )
    TIMEOUT = Face(
        http_status=504,
        grpc_code=grpc.StatusCode.DEADLINE_EXCEEDED,
        type="timeout_error",
        anthropic_type="timeout_error",
        code="deadline_exceeded",
    )


class ApiError(Exception):
    """A verdict on one request, with what its client may know about it."""

    def __init__(
        self,
        verdict: Verdict,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(verdict, message, param, retry_after_s)
        self.verdict = verdict
        self.face: Face = verdict.value
        self.message = message[:MAX_MESSAGE_CHARACTERS]
        self.param = param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    def to_dict(self, request_id: str = "") -> dict[str, object]:
        """Return OpenAI's error object; `request_id` stands beside it."""
        error = {
            "message": self.message,
            "type": self.face.type,
            "param": self.param,
            "code": self.face.code,
        }
        return {"error": error, "request_id": request_id} if request_id else {"error": error}

    def to_anthropic(self, request_id: str) -> dict[str, object]:
        """Return Anthropic's error object; the field, if one is to blame, stands in the message."""
        error = {"type": self.face.anthropic_type, "message": self.message}
        return {"type": "error", "error": error, "request_id": request_id}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Make the commonest verdict: the client's own fault, with what to change."""
    return ApiError(Verdict.INVALID, message, param=param)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return the same verdict in the words of another API than the one that judges for all."""
    param = error.param or ""
    base, bracket, place = param.partition("[")
    name = names.get(param) or f"{names.get(base, base)}{bracket}{place}"
    for old, new in names.items():
        if old.startswith("."):  # a part of a path
            name = name.replace(old, new)
    if name == param:
        return error
    return ApiError(
        error.verdict,
        error.message.replace(param, name),
        param=name,
        retry_after_s=error.retry_after_s,
    )


def show(value: object) -> str:
    """Write a client's value into a message, never more than a little of it."""
    if isinstance(value, str):
        return repr(value[:MAX_ECHO_CHARACTERS]) + (
            "..." if len(value) > MAX_ECHO_CHARACTERS else ""
        )
    if value is None or isinstance(value, bool | int | float):
        return repr(value)[:MAX_ECHO_CHARACTERS]
    return "a list" if isinstance(value, list) else "an object"


# First match counts. None: the error's own message, which was written for clients.
_VERDICTS: tuple[tuple[type[Exception], Verdict, str | None], ...] = (
    (router_errors.NeverFits, Verdict.CONTEXT_LENGTH, None),
    (router_errors.InvalidRequest, Verdict.INVALID, None),
    (router_errors.QueueFull, Verdict.QUEUE_FULL, "The server is at capacity; try again later"),
    (
        router_errors.NoWorkers,
        Verdict.UNAVAILABLE,
        "No workers can take the request now; try again later",
    ),
    (router_errors.SlowReader, Verdict.CANCELLED, "The client reads too slowly"),
    (router_errors.RequestTimeout, Verdict.TIMEOUT, "The request missed its deadline"),
    (TimeoutError, Verdict.TIMEOUT, "The request missed its deadline"),
    (Exception, Verdict.FAILED, "The server failed to serve the request"),
)


def to_api_error(error: Exception) -> ApiError:
    """Give the verdict on any exception; our own faults say nothing of their inside."""
    if isinstance(error, ApiError):
        return error
    for kind, verdict, message in _VERDICTS:
        if isinstance(error, kind):
            retry_after_s = getattr(error, "retry_after_s", None)
            return ApiError(verdict, message or str(error), retry_after_s=retry_after_s)
    raise AssertionError("every exception has a row")
