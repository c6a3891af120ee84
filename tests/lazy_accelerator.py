"""A device that does nothing before somebody waits for it: whoever is too early sees old memory."""

from collections.abc import Callable

import torch


class _Mark:
    def __init__(self, accelerator: "LazyAccelerator", place: int) -> None:
        self._accelerator = accelerator
        self._place = place

    def synchronize(self) -> None:
        self._accelerator.run_until(self._place)


class _Graph:
    def __init__(self, accelerator: "LazyAccelerator", run: Callable[[], None]) -> None:
        self._accelerator = accelerator
        self._run = run

    def replay(self) -> None:
        self._accelerator.queue("replay", self._run)


class LazyAccelerator:
    """Owns a queue of what was asked for. Invariant: it is done in order, and as late as can be."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.host_bytes = 0
        self._queue: list[tuple[str, Callable[[], None]]] = []

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        self.host_bytes += num_bytes
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.queue("copy", lambda: target.copy_(source))

    def mark(self) -> _Mark:
        return _Mark(self, len(self.done) + len(self._queue))

    def capture(self, run: Callable[[], None]) -> _Graph:
        self.run_until(len(self.done) + len(self._queue))
        run()
        return _Graph(self, run)

    def reserved_bytes(self) -> int:
        return 1000 * len(self.done)

    def queue(self, name: str, run: Callable[[], object]) -> None:
        """Do it when its time has come."""
        self._queue.append((name, run))  # type: ignore[arg-type]

    def run_until(self, place: int) -> None:
        """Do what was queued before this place."""
        while len(self.done) < place:
            name, run = self._queue.pop(0)
            run()
            self.done.append(name)
