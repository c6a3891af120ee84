"""Failures that cross our process borders by name; `rpc.status` says with which gRPC code.

A servicer raises one, the interceptor of the server turns it into a status, and
`from_rpc_error` gives the caller the same class back.
"""


class WorkerError(Exception):
    """Base of all failures a worker reports; raised itself by nobody."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # when another try may succeed, where that is known


class InvalidRequestError(WorkerError):
    """The request is wrong and would be so on every worker."""


class StaleWorkerError(WorkerError):
    """The caller meant another incarnation of this worker, or speaks for a past epoch."""


class AdmissionRefusedError(WorkerError):
    """This worker is full now; another may not be."""


class DrainingError(WorkerError):
    """This worker takes no new requests because it is about to stop."""


class WorkerUnavailableError(WorkerError):
    """The worker cannot be reached, or went away during the call."""


class TransferLostError(WorkerError):
    """The KV of this transfer is gone; the request itself can be tried again."""


class UnknownTransferError(WorkerError):
    """No transfer of that id has been announced here."""


class RequestFailedError(WorkerError):
    """The worker lives, but something broke while it worked on this request."""


class DeadlineError(WorkerError):
    """The call's time ran out."""


class UnauthenticatedError(WorkerError):
    """The call did not carry the cluster's token."""
