"""Where Serve's controller keeps what the ingresses wish for, between its deployments' policies.

Serve calls one policy for each deployment and shows it that deployment alone; what both pools
need is decided together, by the ingress. The policies run in one process and one thread: the
ingress's writes here, those of the pools read.
"""

from collections.abc import Mapping
from typing import NamedTuple

FRESH_S = 15.0  # a wish that is older says nothing of now


class Wish(NamedTuple):
    """What one ingress replica wished for, when."""

    at_s: float
    target: int
    is_floor: bool = False  # at least


# (application, pool) -> the wish of each ingress replica.
_wishes: dict[tuple[str, str], Mapping[str, Wish]] = {}


def write(application: str, pool: str, wishes: Mapping[str, Wish]) -> None:
    """Replace the wishes for a pool."""
    _wishes[application, pool] = wishes


def read(application: str, pool: str, *, present: int, now_s: float) -> int:
    """The greatest fresh wish, since each ingress sees its own queue; without one the present.

    Never fewer than at present while an ingress does not know all workers yet.
    """
    wishes = _wishes.get((application, pool), {}).values()
    fresh = [wish for wish in wishes if now_s - wish.at_s <= FRESH_S]
    greatest = max((wish.target for wish in fresh), default=present)
    return max(greatest, present) if any(wish.is_floor for wish in fresh) else greatest
