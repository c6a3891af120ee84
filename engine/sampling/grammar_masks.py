"""Masks of the next tokens, computed while the forward runs."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from engine.request import Request
from engine.token_mask import TokenMask, TokenMaskError

# The whole batch waits for the slowest mask, and an ambiguous grammar has more ways to follow with
# every token. What is usual takes a tenth of a millisecond; a new state of it some ten, once.
_FAIR_S = 0.01  # of processor time for each mask
_PATIENCE_S = 0.5  # beyond that, for a whole output


@dataclass(slots=True, kw_only=True)
class _Place:
    """Where one request is in its grammar, and what it cost to get there."""

    mask: TokenMask
    num_masks: int = 0
    spent_s: float = 0.0


class GrammarMasks:
    """Owns each request's place in its grammar, and the thread that moves it; both from first use.

    Invariant: a place is touched by that thread alone, and depends on the output's ids alone.
    """

    def __init__(self, *, now: Callable[[], float] = time.thread_time) -> None:
        self._now = now  # asked by that thread: how much of a processor it has had
        self._thread: ThreadPoolExecutor | None = None
        self._places: WeakKeyDictionary[Request, _Place] = WeakKeyDictionary()
        self._pending: dict[Request, Future[npt.NDArray[np.bool_]]] = {}

    def start(self, requests: Iterable[Request]) -> None:
        """Begin the masks of the tokens these requests sample next."""
        self._pending.clear()  # left over from a step that failed
        for request in requests:
            if request.new_token_mask is None:
                continue
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token-masks")
            self._pending[request] = self._thread.submit(self._compute, request)

    def take(self, request: Request) -> npt.NDArray[np.bool_]:
        """Wait for a mask that was started, [vocab_size]; TokenMaskError when there is none."""
        return self._pending.pop(request).result()

    def _compute(self, request: Request) -> npt.NDArray[np.bool_]:
        started_s = self._now()
        place = self._places.get(request)
        if place is None:
            assert request.new_token_mask is not None
            place = self._places[request] = _Place(mask=request.new_token_mask())
        mask = place.mask
        try:
            mask.advance(request.token_ids[request.num_prompt_tokens + mask.num_tokens :])
            allowed = mask.allowed_tokens()
        except ValueError as error:
            raise TokenMaskError(str(error)) from error
        place.num_masks += 1
        place.spent_s += self._now() - started_s
        if place.spent_s > _PATIENCE_S + _FAIR_S * place.num_masks:
            raise TokenMaskError(
                f"its grammar is too costly to follow: {1e3 * place.spent_s / place.num_masks:.0f} "
                f"ms a token after {place.num_masks} of them; make it less ambiguous"
            )
        return allowed
