"""Follows a grammar for a little while: what it compiles to may still be too much to follow."""

import random
import time
from collections.abc import Callable

from grammar.compiler import CompiledGrammar
from grammar.grammar import GrammarError

_NUM_WAYS = 6
_NUM_TOKENS = 24  # of each way at most
_MAX_MASK_S = 0.02  # of processor time on average: a whole batch waits for it


def try_out(
    compiled: CompiledGrammar,
    eos_token_ids: tuple[int, ...],
    *,
    now: Callable[[], float] = time.thread_time,
) -> None:
    """Take random ways from its beginning; GrammarError when one cannot be gone, or all too slowly.

    The same ways each time. It finds most of what would fail a request in the middle, not all.
    """
    num_masks, started_s = 0, now()
    for seed in range(_NUM_WAYS):
        chance, mask = random.Random(seed), compiled.new_mask()
        try:
            for _ in range(_NUM_TOKENS):
                num_masks += 1
                allowed = mask.allowed_tokens().nonzero()[0]
                token_id = int(allowed[chance.randrange(len(allowed))])
                if token_id in eos_token_ids:
                    break
                mask.advance([token_id])
        except ValueError as error:
            raise GrammarError(f"{error}; make it simpler") from error
    mean_s = (now() - started_s) / num_masks
    if mean_s > _MAX_MASK_S:
        raise GrammarError(
            f"it takes {1e3 * mean_s:.0f} ms to tell which tokens may come next; make it simpler"
        )
