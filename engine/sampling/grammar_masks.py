"""Masks of the next tokens, computed while the forward runs."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from engine.request import Request
from engine.token_mask import TokenMask


class GrammarMasks:
    """Owns each request's place in its grammar, and the thread that moves it; both from first use.

    Invariant: a place is touched by that thread alone, and depends on the output's ids alone.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._places: WeakKeyDictionary[Request, TokenMask] = WeakKeyDictionary()
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
        """Wait for a mask that was started, [vocab_size]; ValueError when there is none."""
        return self._pending.pop(request).result()

    def _compute(self, request: Request) -> npt.NDArray[np.bool_]:
        place = self._places.get(request)
        if place is None:
            assert request.new_token_mask is not None
            place = request.new_token_mask()
            self._places[request] = place
        place.advance(request.token_ids[request.num_prompt_tokens + place.num_tokens :])
        return place.allowed_tokens()
