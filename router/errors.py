"""How a request can fail here. The ingress maps each class to one status."""


class RouterError(Exception):
    """A request ended without a finish reason."""


class QueueFull(RouterError):  # noqa: N818
    """Refused early because of overload (429)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class NoWorkers(RouterError):  # noqa: N818
    """No choice of workers exists: not yet ready, or none came before the deadline (503)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class SlowReader(RouterError):  # noqa: N818
    """The consumer does not take its tokens (499)."""


class RequestTimeout(RouterError):  # noqa: N818
    """The deadline passed (504)."""


class InvalidRequest(RouterError):  # noqa: N818
    """A worker called the request invalid; another would say the same (400)."""


class NeverFits(InvalidRequest):
    """Longer than any worker could ever hold (400)."""


class GenerationFailed(RouterError):  # noqa: N818
    """Workers kept failing while they ran this request (500)."""
