"""The rendezvous of one link: a torch store whose entries travel over the link's control stream."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store


class RendezvousStore(Store):
    """A dictionary mirrored to the peer, used only while a link is being built.

    `on_set` is called on the thread that builds the link, `deliver` and `close` by whoever reads
    the control stream. torch never enforces a timeout on a Python store, so `get` and `wait` do.
    The owner must keep a strong reference for as long as the process group lives: torch holds only
    the C++ half.
    """

    def __init__(self, on_set: Callable[[str, bytes], None], *, timeout_s: float) -> None:
        super().__init__()
        self._on_set = on_set
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}
        self._closed_reason = ""
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes | str) -> None:
        """Store here and at the peer."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._put(key, data)
        self._on_set(key, data)

    def deliver(self, key: str, value: bytes) -> None:
        """Take over an entry that the peer has set."""
        self._put(key, value)

    def close(self, reason: str) -> None:
        """Fail whoever waits now or later; the peer is gone."""
        with self._changed:
            self._closed_reason = reason
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Return the value, waiting for it up to the timeout."""
        self._wait_for([key], self._timeout_s)
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are present."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._wait_for(keys, min(timeout_s, self._timeout_s))

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all keys are present now."""
        with self._changed:
            return all(key in self._entries for key in keys)

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def _wait_for(self, keys: Sequence[str], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed_reason or all(key in self._entries for key in keys), timeout_s
            )
            absent = [key for key in keys if key not in self._entries]
            if absent and self._closed_reason:
                raise ConnectionError(f"rendezvous closed: {self._closed_reason}")
            if absent:
                raise TimeoutError(f"no rendezvous key {absent} within {timeout_s:.1f} s")
