"""What moves the granted ranges of one link between it and a pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Spoils what travels: fault injection.
Alter = Callable[[torch.Tensor], None]


@dataclass(slots=True, kw_only=True)
class RangeOrder:
    """One operation: tokens [token_start, token_end) of a request's blocks."""

    block_ids: Sequence[int]
    token_start: int
    token_end: int
    timeout_s: float
    # of one to receive over shared memory: the peer's blocks that hold these tokens
    lent: Sequence[int] = ()
    # what the mover made of it ahead, for itself
    plan: Any = None


class RangeMover(Protocol):
    """Used by one operation at a time, on the link's thread; `prepare` comes from others, too."""

    def prepare(self, order: RangeOrder) -> None:
        """Plan ahead an order that is asked for: it may soon be received."""

    def prepare_send(self, order: RangeOrder) -> None:
        """Do ahead what can be done of a range of our own that will soon be asked for."""

    def send_range(self, link: Any, order: RangeOrder, *, alter: Alter | None) -> int:
        """Send a range; returns the bytes."""

    def receive_range(
        self, link: Any, order: RangeOrder, *, alter: Alter | None, is_wanted: bool
    ) -> int:
        """Receive a range into the blocks, or let it pass by when it is not wanted any more.

        Returns the bytes. When it returns or raises, nothing writes the blocks any more.
        """
