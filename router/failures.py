"""What a failed call means for a request: retry where, and does it count."""

import grpc

from router.errors import InvalidRequest, RequestTimeout
from router.retry import Failure
from router.worker_view import WorkerKey
from rpc.errors import (
    AdmissionRefusedError,
    DeadlineError,
    DrainingError,
    InvalidRequestError,
    StaleWorkerError,
    TransferLostError,
    UnknownTransferError,
    WorkerUnavailableError,
)
from rpc.status import from_rpc_error

# Only a servicer sends these; without them the transport itself made the status.
_DETAILS_KEY = "grpc-status-details-bin"
# A call's deadline may pass this long before ours: clocks differ in their grain.
TIMER_SLACK_S = 0.05
_CONNECT_MESSAGE = "failed to connect"

_CAUSES = {
    AdmissionRefusedError: "refused",
    StaleWorkerError: "stale",
    DrainingError: "unreachable",
    WorkerUnavailableError: "unreachable",
    TransferLostError: "transfer",
    UnknownTransferError: "transfer",
}
_BEFORE_ADMISSION = frozenset({"refused", "stale"})


def failure_of(error: grpc.aio.AioRpcError, key: WorkerKey, *, has_answered: bool) -> Failure:
    """Classify a failed leg.

    Raises nothing: an invalid request and a passed deadline are failures too, told by their cause.
    """
    told = from_rpc_error(error)
    cause = _CAUSES.get(type(told), "error")
    was_admitted = cause not in _BEFORE_ADMISSION
    if isinstance(told, InvalidRequestError):
        cause = "invalid"
    elif isinstance(told, DeadlineError):
        cause = "deadline"
    elif cause == "unreachable":
        # A connection that broke in the middle of a call may have been broken by that call.
        was_admitted = has_answered or not _never_arrived(error)
        cause = "lost" if was_admitted else cause
    return Failure(
        cause=cause,
        message=f"{key.worker_id}: {told}",
        was_admitted=was_admitted,
        workers=frozenset({key}),
    )


def failure_on(key: WorkerKey, cause: str, message: str) -> Failure:
    """A failure after admission that no status told."""
    return Failure(
        cause=cause,
        message=f"{key.worker_id}: {message}",
        was_admitted=True,
        workers=frozenset({key}),
    )


def raise_if_final(failure: Failure, *, time_left_s: float) -> None:
    """Raise what no other worker could change."""
    if failure.cause == "invalid":
        raise InvalidRequest(failure.message)
    if time_left_s <= (TIMER_SLACK_S if failure.cause == "deadline" else 0.0):
        raise RequestTimeout(f"the deadline passed: {failure.message}")


def _never_arrived(error: grpc.aio.AioRpcError) -> bool:
    is_from_servicer = any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    return is_from_servicer or _CONNECT_MESSAGE in (error.details() or "").lower()
