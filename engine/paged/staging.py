"""The numbers of a step on their way to the device: packed, so that one copy brings them all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.paged.accelerator import Accelerator, Mark

_ALIGNMENT = 16  # bytes; kernels read whole vectors
_NUM_BUFFERS = 2  # one is filled while the other is read

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each array lies in a buffer. Arrays of the same shapes have the same layout."""

    offsets: dict[str, int]
    num_bytes: int

    @classmethod
    def of(cls, arrays: Arrays) -> "Layout":
        """One behind the other, in their order."""
        offsets: dict[str, int] = {}
        end = 0
        for name, array in arrays.items():
            offsets[name] = end
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(offsets, end)

    def views(self, buffer: torch.Tensor, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Each array's own place in `buffer` [num_bytes] uint8, as a tensor of its kind."""
        return {
            name: buffer[self.offsets[name] : self.offsets[name] + array.nbytes]
            .view(torch.from_numpy(array[:0]).dtype)
            .view(array.shape)
            for name, array in arrays.items()
        }


class Staging:
    """Owns host memory that copies read. Invariant: nobody writes it before a copy has read it."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self._accelerator = accelerator
        self._device = device
        self._buffers = [accelerator.host_memory(0)] * _NUM_BUFFERS
        self._marks: list[Mark | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def upload(
        self, arrays: Arrays, *, into: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The arrays as tensors of the device, in fresh memory or in `into` [num_bytes] uint8.

        They are there for what is queued from now on; the arrays themselves are free at once.
        """
        layout = Layout.of(arrays)
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        buffer = self._free_buffer(layout.num_bytes)
        for name, array in arrays.items():
            start = layout.offsets[name]
            place = buffer[start : start + array.nbytes].numpy()
            place[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if into is None:
            into = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
        self._accelerator.copy(into, buffer)
        self._marks[self._turn] = self._accelerator.mark()
        return layout.views(into, arrays)

    def _free_buffer(self, num_bytes: int) -> torch.Tensor:
        """This turn's buffer, once its last copy is over; [num_bytes]."""
        if (mark := self._marks[self._turn]) is not None:
            mark.synchronize()
        if len(self._buffers[self._turn]) < num_bytes:
            self._buffers[self._turn] = self._accelerator.host_memory(2 * num_bytes)
        return self._buffers[self._turn][:num_bytes]
