"""The one thread that runs a link's blocking verbs, in order."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class LinkThread:
    """A daemon thread with a queue. Each job runs once, in the order given, also when nobody awaits
    its future any more."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue a job from the event loop; cancelling the future does not stop the job."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
                _settle(loop, future, future.set_exception, error)
            else:
                _settle(loop, future, future.set_result, result)

        self._jobs.put(run)
        return future

    def stop(self) -> None:
        """End the thread after the jobs queued so far."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False when the thread is still busy."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # the last job must not keep tensors and its group alive while the thread idles
            del job


def _settle(
    loop: asyncio.AbstractEventLoop,
    future: "asyncio.Future[Any]",
    setter: Callable[[Any], None],
    value: object,
) -> None:
    def settle() -> None:
        if not future.done():
            setter(value)

    # a loop that is closed has nobody waiting any more
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
