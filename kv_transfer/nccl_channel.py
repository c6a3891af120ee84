"""NCCL as a link's channel: one communicator of two ranks between two CUDA pools.

Nothing is posted before both sides can run it (a grant comes first), posting is serialised per
device, each live link has a stream of its own, and our deadline is the only one that counts.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch._C import _distributed_c10d as c10d

from kv_transfer.backend import LinkBrokenError, LinkTimeoutError

# torch hands out this many streams of one priority in turn
_NUM_POOL_STREAMS = 32
_POLL_S = 0.0002
# channels a point-to-point kernel may use: enough for 400 Gb/s, about 40 MiB on the receiver
MAX_CTAS = 4


class DevicePosting:
    """Serialises what is posted to one device, and keeps live links on different streams."""

    _instances: dict[int, "DevicePosting"] = {}  # noqa: RUF012 - one per device of this process
    _instances_lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        # held for a moment at each post
        self.lock = threading.Lock()
        # builds wait for their peer, so they must not hold up the posts of live links
        self.build_lock = threading.Lock()
        self._device = device
        self._next_slot = 0
        self._live_slots: set[int] = set()

    @classmethod
    def of(cls, device: torch.device) -> "DevicePosting":
        """Return the one of this device."""
        with cls._instances_lock:
            return cls._instances.setdefault(device.index or 0, cls(device))

    def take_stream_slot(self) -> int:
        """Give the next group a stream no live link has; caller holds `build_lock`."""
        if len(self._live_slots) >= _NUM_POOL_STREAMS:
            raise LinkBrokenError(f"{_NUM_POOL_STREAMS} links live on {self._device} already")
        while self._next_slot in self._live_slots:
            # taking a stream is what moves torch's turn on
            torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            self._next_slot = (self._next_slot + 1) % _NUM_POOL_STREAMS
        slot = self._next_slot
        self._live_slots.add(slot)
        self._next_slot = (slot + 1) % _NUM_POOL_STREAMS
        return slot

    def give_stream_slot(self, slot: int) -> None:
        """The link of this slot is closed."""
        self._live_slots.discard(slot)


class NcclOperation:
    """A posted send or receive."""

    def __init__(self, work: c10d.Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        """Poll against our own deadline: torch's wait could end the process instead."""
        deadline = time.monotonic() + timeout_s
        try:
            while not self._work.is_completed():
                if time.monotonic() >= deadline:
                    raise LinkTimeoutError(f"NCCL operation not complete within {timeout_s:.1f} s")
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error


class NcclChannel:
    """A two-rank NCCL group, connected eagerly."""

    def __init__(
        self,
        store: c10d.Store,
        *,
        rank: int,
        group_name: str,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._device = device
        self._peer = 1 - rank
        self._posting = DevicePosting.of(device)
        # An abort may hang: it must find nobody inside this communicator, and hold up no other.
        self._lock = threading.Lock()
        self._is_aborted = False
        prefixed = c10d.PrefixStore(group_name, store)
        with self._posting.build_lock:
            self._slot = self._posting.take_stream_slot()
            try:
                self._group = _build(prefixed, rank, device, _options(group_name, timeout_s))
            except RuntimeError as error:
                self._posting.give_stream_slot(self._slot)
                raise LinkBrokenError(str(error)) from error

    def send(self, tensor: torch.Tensor) -> NcclOperation:
        """Post a contiguous device tensor, ordered after the calling thread's stream."""
        return self._post(lambda: self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: torch.Tensor) -> NcclOperation:
        """Post a device buffer."""
        return self._post(lambda: self._group.recv([tensor], self._peer, 0))

    def abort(self) -> None:
        """Flag the communicator's kernels to end; the caller bounds how long this may take."""
        with self._lock:
            self._group.abort()
            self._is_aborted = True

    def close(self) -> None:
        """Give the stream slot back, unless the abort before this still hangs in the stream."""
        if self._is_aborted:
            with self._posting.build_lock:
                self._posting.give_stream_slot(self._slot)

    def _post(self, post: Callable[[], c10d.Work]) -> NcclOperation:
        # The link's own lock first: whoever waits behind a hanging abort holds up nobody else.
        with self._lock, self._posting.lock:
            if self._is_aborted:
                raise LinkBrokenError("the link was aborted")
            try:
                return NcclOperation(post())
            except RuntimeError as error:
                raise LinkBrokenError(str(error)) from error


def _options(group_name: str, timeout_s: float) -> "c10d.ProcessGroupNCCL.Options":
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 - the only door to it
    options.is_high_priority_stream = True
    options.global_ranks_in_group = [0, 1]
    options.group_name = cast(Any, group_name)
    # a blocking communicator cannot be aborted while it is being made
    options.config.blocking = 0
    options.config.min_ctas = 1
    options.config.max_ctas = MAX_CTAS
    return options


def _build(
    store: c10d.Store, rank: int, device: torch.device, options: "c10d.ProcessGroupNCCL.Options"
) -> Any:
    group: Any = c10d.ProcessGroupNCCL(store, rank, 2, options)
    group._set_sequence_number_for_group()  # noqa: SLF001 - part of building a bare group
    # without it the first send would make a second communicator
    group.eager_connect_single_device(device)
    return group
