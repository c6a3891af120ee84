"""The threads of a link: one that runs its blocking verbs in order, others that end it.

None of them is the event loop's own: those are few, and whoever blocks there holds up all links.
"""

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class LinkThread:
    """A daemon thread with a queue. Each job runs once, in the order given, also when nobody awaits
    its future any more."""

    def __init__(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue a job from the event loop; cancelling the future does not stop the job."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(functools.partial(_run, self._loop, future, job))
        return future

    def stop(self) -> None:
        """End the thread after the jobs queued so far; `ended` tells when that is."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # the last job must not keep tensors and its group alive while the thread idles
            del job
        _settle(self._loop, self.ended, self.ended.set_result, None)


def run_in_thread(name: str, job: Callable[[], T]) -> "asyncio.Future[T]":
    """Run one job in a daemon thread made for it; cancelling the future does not stop the job."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    threading.Thread(target=_run, args=(loop, future, job), name=name, daemon=True).start()
    return future


def _run(
    loop: asyncio.AbstractEventLoop, future: "asyncio.Future[T]", job: Callable[[], T]
) -> None:
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
        _settle(loop, future, future.set_exception, error)
    else:
        _settle(loop, future, future.set_result, result)


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
