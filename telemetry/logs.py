"""One log format for all processes, with the request id in every line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")

_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s [%(request_id)s] %(message)s"
# Text from a client must not be able to forge a second log line or steer a terminal.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))}


class _LineFormatter(logging.Formatter):
    """Adds the request id and keeps each message on one line; tracebacks stay as they are."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.request_id = request_id.get().translate(_ESCAPES)
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Marks the handler that is ours, so that setting up twice does not log twice."""


def set_up_logging(level: str = "INFO") -> None:
    """Log to stderr in our format from now on; repeating it only changes the level."""
    root = logging.getLogger()
    root.setLevel(level)
    if any(isinstance(handler, _Handler) for handler in root.handlers):
        return
    handler = _Handler()
    handler.setFormatter(_LineFormatter(_FORMAT))
    root.addHandler(handler)


@contextmanager
def request_scope(current_id: str) -> Iterator[None]:
    """Put `current_id` into every line logged by the body and by the tasks it starts."""
    token = request_id.set(current_id)
    try:
        yield
    finally:
        request_id.reset(token)
