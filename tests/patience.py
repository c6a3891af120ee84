"""Limits that a pause of the machine does not use up.

They count naps and not seconds, so of a pause of this process only one nap is seen; and where all
processes get less of the processor, looking takes longer, too.
"""

import asyncio
import math
from collections.abc import Callable

NAP_S = 0.01


def naps(within_s: float, nap_s: float = NAP_S) -> range:
    """As many as fill this time on a machine that does nothing else."""
    return range(math.ceil(within_s / nap_s))


async def comes_true(is_true: Callable[[], object], within_s: float) -> bool:
    """Whether it does in time, as seen from outside."""
    for _ in naps(within_s):
        if is_true():
            return True
        await asyncio.sleep(NAP_S)
    return bool(is_true())


async def until(is_true: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait for it; an AssertionError when it does not come true in time."""
    assert await comes_true(is_true, within_s), f"not within {within_s} s"
