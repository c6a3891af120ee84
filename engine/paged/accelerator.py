"""What a device that runs on its own time offers; a CPU has done everything at once."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A place in the device's queue."""

    def synchronize(self) -> None:
        """Return when all that was queued before it is done."""


class Graph(Protocol):
    """Operations that were captured together."""

    def replay(self) -> None:
        """Queue them again, on the memory they were captured with."""


class Accelerator(Protocol):
    """A device's queue; what one call queues is done before what the next one does."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host that copies may read and write by themselves, [num_bytes] uint8."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to or from such memory: hands off until a later mark has passed."""

    def mark(self) -> Mark:
        """A mark behind everything queued so far."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Make a graph of what `run` does; it must not ask for any number, nor change shapes."""

    def reserved_bytes(self) -> int:
        """Device memory that this process has taken."""


class CudaAccelerator:
    """One CUDA device, on the stream of whoever calls.

    Graphs share one pool of memory: a replay ends before the next one begins, so what one leaves is
    the other's. Whoever wants to keep a graph's result copies it before the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph_memory: Any = None

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Pinned, [num_bytes] uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """An event that sleeps rather than spins while it is waited for."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def capture(self, run: Callable[[], None]) -> Graph:
        """Warm up on a stream beside the main one, then capture, as torch's notes on graphs ask."""
        main = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            run()  # kernels are loaded, and libraries take their workspaces
            # What waits for the device ends here: within a capture it would spoil more than itself.
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        main.wait_stream(side)
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Links of other threads may call CUDA meanwhile: only this thread's calls are judged.
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            run()
        return graph

    def reserved_bytes(self) -> int:
        """What torch has taken of the device."""
        return torch.cuda.memory_reserved(self._device)


class _Passed:
    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostAccelerator:
    """A CPU: what is queued is done."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Plain memory, [num_bytes] uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def mark(self) -> Mark:
        """A mark that has passed."""
        return _Passed()

    def capture(self, run: Callable[[], None]) -> Graph:
        """What repeats `run`."""
        run()
        return _Repeat(run)

    def reserved_bytes(self) -> int:
        """Nothing of a device."""
        return 0


class _Repeat:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


def accelerator_of(device: torch.device) -> Accelerator:
    """The queue of a device."""
    return CudaAccelerator(device) if device.type == "cuda" else HostAccelerator()
