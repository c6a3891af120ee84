"""Memory of this process that others on the same host may map, but never write.

It has no name anywhere: whoever shall map it is handed the descriptor, and when the last process
that knows it is gone, so is the memory, however that process ended.
"""

import fcntl
import math
import mmap
import os
import weakref

import torch

# Linux 5.1; Python has no name for it: no new writable mapping, ours stays.
_F_SEAL_FUTURE_WRITE = 0x0010
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class SharedMemory:
    """One piece of anonymous shared memory, all zeros at first.

    Invariant: its size never changes, so that a reader is never left without pages.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("relevo-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        # Pages come with their first use, as those of a large tensor do.
        self._mapping = mmap.mmap(self.descriptor, num_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """View the start of the memory, writable; the mapping lives as long as the view."""
        return torch.frombuffer(self._mapping, dtype=dtype, count=math.prod(shape)).view(shape)
