"""When requests are due."""

import itertools
import random
from collections.abc import Iterator


def poisson(rate_per_s: float, rng: random.Random) -> Iterator[float]:
    """Seconds since the start: independent clients, as many a second on the average."""
    gaps = (rng.expovariate(rate_per_s) for _ in itertools.count())
    return itertools.accumulate(gaps)


def fixed(rate_per_s: float) -> Iterator[float]:
    """Seconds since the start: like a clock."""
    return (number / rate_per_s for number in itertools.count())
