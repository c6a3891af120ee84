"""Where Serve's controller keeps what the ingresses wish for, between its deployments' policies.

Serve calls one policy for each deployment and shows it that deployment alone; what both pools
need is decided together, by the ingress. The policies run in one process and one thread: the
ingress's writes here, those of the pools read.
"""

from collections.abc import Mapping

FRESH_S = 15.0  # a wish that is older says nothing of now

# (application, pool) -> what each ingress replica wished for: (time, workers).
_wishes: dict[tuple[str, str], Mapping[str, tuple[float, int]]] = {}


def write(application: str, pool: str, wishes: Mapping[str, tuple[float, int]]) -> None:
    """Replace the wishes for a pool: by replica, when it was and how many workers."""
    _wishes[application, pool] = wishes


def read(application: str, pool: str, *, now_s: float) -> int | None:
    """The greatest fresh wish, since each ingress sees its own queue; None without one."""
    wishes = _wishes.get((application, pool), {}).values()
    return max((number for at_s, number in wishes if now_s - at_s <= FRESH_S), default=None)
