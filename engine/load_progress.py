"""How far the reading of weights is: a bar on a terminal, plain lines in a log."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)

_LINE_PERIOD_S = 5.0


class ProgressLines:
    """Says in the log, every few seconds and at the end, how many tensors are there."""

    def __init__(
        self,
        tensors: Iterable[Any],
        total: int,
        *,
        name: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tensors = tensors
        self._total = total
        self._name = name
        self._now = now

    def __iter__(self) -> Iterator[Any]:
        started_s = said_s = self._now()
        for number, tensor in enumerate(self._tensors):
            now_s = self._now()
            if now_s - said_s >= _LINE_PERIOD_S:
                said_s = now_s
                self._say(number, now_s - started_s)
            yield tensor
        self._say(self._total, self._now() - started_s)

    def _say(self, number: int, elapsed_s: float) -> None:
        percent = 100 * number // max(1, self._total)
        logger.info(
            "loading %s: %d %% (%d of %d tensors, %.1f s)",
            self._name,
            percent,
            number,
            self._total,
            elapsed_s,
        )


@contextmanager
def showing_progress(name: str) -> Iterator[None]:
    """While transformers loads in here, its bar is ours."""

    def show(make_bar: Callable[..., Any], arguments: tuple[Any, ...], options: Any) -> Any:
        if sys.stderr.isatty():
            return make_bar(*arguments, **{**options, "desc": f"loading {name}", "unit": "tensor"})
        tensors = arguments[0] if arguments else options.get("iterable", ())
        return ProgressLines(tensors, options.get("total") or len(tensors), name=name)

    previous = transformers_logging.set_tqdm_hook(show)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
