"""What the engine needs of a grammar, whoever makes it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenMaskError(ValueError):
    """A request's own grammar does not let it go on, here or on any other worker."""


class TokenMask(Protocol):
    """One request's way through its grammar; used by one thread at a time."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the output taken so far."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the output's next tokens; ValueError when the grammar does not allow them."""

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [vocab_size]; ValueError when that cannot be told.

        When nothing may follow, these are the end-of-sequence tokens.
        """
