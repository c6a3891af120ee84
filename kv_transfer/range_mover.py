"""What moves the granted ranges of one link between it and a pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Spoils what travels: fault injection.
Alter = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOrder:
    """One granted operation: tokens [token_start, token_end) of a request's blocks."""

    block_ids: Sequence[int]
    token_start: int
    token_end: int
    timeout_s: float


class RangeMover(Protocol):
    """Used by one operation at a time, on the link's thread."""

    def send_range(self, link: Any, order: RangeOrder, *, alter: Alter | None) -> int:
        """Send a range; returns the bytes."""

    def receive_range(
        self, link: Any, order: RangeOrder, *, alter: Alter | None, is_wanted: bool
    ) -> int:
        """Receive a range into the blocks, or let it pass by when it is not wanted any more.

        Returns the bytes. When it returns or raises, nothing writes the blocks any more.
        """
