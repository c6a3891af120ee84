"""The one table between exceptions and gRPC statuses, in both directions.

A status of ours carries google.rpc details: ErrorInfo names the exception class, RetryInfo says
when to come back. A status without ErrorInfo was made by the transport, not by a servicer.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from rpc import errors

_DETAILS_KEY: Final = "grpc-status-details-bin"
_DOMAIN: Final = "relevo"
# All metadata of a response together must stay well below 8 KiB; the message travels twice.
_MAX_MESSAGE_CHARS: Final = 1024

_CODES: Final[Mapping[type[Exception], grpc.StatusCode]] = MappingProxyType(
    {
        errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
        errors.StaleWorkerError: grpc.StatusCode.FAILED_PRECONDITION,
        errors.AdmissionRefusedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.DrainingError: grpc.StatusCode.UNAVAILABLE,
        errors.WorkerUnavailableError: grpc.StatusCode.UNAVAILABLE,
        errors.TransferLostError: grpc.StatusCode.ABORTED,
        errors.UnknownTransferError: grpc.StatusCode.NOT_FOUND,
        errors.RequestFailedError: grpc.StatusCode.INTERNAL,
        errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
        # What servicers may raise without knowing of gRPC.
        ValueError: grpc.StatusCode.INVALID_ARGUMENT,
        TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
_CLASSES: Final[Mapping[str, type[errors.WorkerError]]] = MappingProxyType(
    {each.__name__: each for each in _CODES if issubclass(each, errors.WorkerError)}
)
# How gRPC's own statuses read; every other one means that the worker was not reached or is lost.
_TRANSPORT_CLASSES: Final[Mapping[grpc.StatusCode, type[errors.WorkerError]]] = MappingProxyType(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
        grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
        grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
        # A message above the size limit, which a second try would not make smaller.
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.InvalidRequestError,
        grpc.StatusCode.UNIMPLEMENTED: errors.RequestFailedError,
    }
)


class StatusParts(NamedTuple):
    """What ends a call; `context.abort(*parts)`."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the code of the closest class in the table; INTERNAL when there is none."""
    for each in type(error).__mro__:
        if each in _CODES:
            return _CODES[each]
    return grpc.StatusCode.INTERNAL


def to_status(error: Exception) -> StatusParts:
    """Turn an exception into a status. Text of an unexpected one stays in this process's log."""
    code = code_of(error)
    if isinstance(error, errors.WorkerError):
        reason, message, retry_after_s = type(error).__name__, str(error), error.retry_after_s
    elif code is grpc.StatusCode.INVALID_ARGUMENT:
        reason, message, retry_after_s = errors.InvalidRequestError.__name__, str(error), None
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        reason, message, retry_after_s = errors.DeadlineError.__name__, str(error), None
    else:
        reason, retry_after_s = errors.RequestFailedError.__name__, None
        message = f"internal error ({type(error).__name__})"
    return build_status(code, message, reason=reason, retry_after_s=retry_after_s)


def build_status(
    code: grpc.StatusCode, message: str, *, reason: str, retry_after_s: float | None = None
) -> StatusParts:
    """Make a status with google.rpc details."""
    message = message[:_MAX_MESSAGE_CHARS]
    details: list[any_pb2.Any] = [any_pb2.Any()]
    details[0].Pack(error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN))
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(max(0, round(retry_after_s * 1000)))
        details.append(any_pb2.Any())
        details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    number = code.value[0]
    rich = status_pb2.Status(code=number, message=message, details=details)
    return StatusParts(code, message, ((_DETAILS_KEY, rich.SerializeToString()),))


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.WorkerError:
    """Turn a failed call back into what its servicer raised, or into the transport's trouble."""
    message = error.details() or error.code().name
    reason, retry_after_s = _read_details(error)
    known = _CLASSES.get(reason)
    if known is None:
        known = _TRANSPORT_CLASSES.get(error.code(), errors.WorkerUnavailableError)
    return known(message, retry_after_s=retry_after_s)


def _read_details(error: grpc.aio.AioRpcError) -> tuple[str, float | None]:
    reason, retry_after_s = "", None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            details = status_pb2.Status.FromString(value).details
            for detail in details:
                info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
                if detail.Unpack(info) and info.domain == _DOMAIN:
                    reason = info.reason
                elif detail.Unpack(retry):
                    retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
        except DecodeError:
            # The call has failed anyway; its code must do.
            continue
    return reason, retry_after_s
