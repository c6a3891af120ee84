"""The KV blocks of one simulated worker: owned by requests, or cached and evicted oldest first.

The same rules as in `engine/block_pool.py`, but with names alone: a pool of a million blocks costs
nothing before it is used.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from router.block_name import BlockName


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """What one request owns."""

    names: list[BlockName] = field(default_factory=list)  # findable, maybe others own them too
    num_nameless: int = 0


class BlockCache:
    """Owns every block. Invariant: free + cached + used == num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_nameless = 0  # owned, not findable
        self._owners: dict[BlockName, int] = {}
        self._cached: OrderedDict[BlockName, None] = OrderedDict()
        self._stored: dict[BlockName, None] = {}
        self._removed: dict[BlockName, None] = {}

    @property
    def num_used(self) -> int:
        """Blocks somebody owns."""
        return len(self._owners) + self._num_nameless

    @property
    def num_cached(self) -> int:
        """Blocks nobody owns that can still be found."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """All others."""
        return self.num_blocks - self.num_used - self.num_cached

    def num_leading(self, names: Iterable[BlockName]) -> int:
        """How many of a prompt's first blocks are here."""
        owners, cached, num_found = self._owners, self._cached, 0
        for name in names:
            if name not in owners and name not in cached:
                break
            num_found += 1
        return num_found

    def take(self, names: Sequence[BlockName], num_blocks: int) -> Lease | None:
        """Own what is here of a prompt, and nameless blocks up to `num_blocks`; None: no room."""
        found = names[: self.num_leading(names)]
        num_new = max(num_blocks - len(found), 0)
        num_revived = sum(name in self._cached for name in found)
        if num_new > self.num_free + self.num_cached - num_revived:
            return None
        for name in found:
            self._cached.pop(name, None)
            self._owners[name] = self._owners.get(name, 0) + 1
        while self.num_free < num_new:
            self._evict()
        self._num_nameless += num_new
        return Lease(names=list(found), num_nameless=num_new)

    def store(self, lease: Lease, names: Iterable[BlockName]) -> None:
        """These blocks of the request are computed: others may find them."""
        for name in names:
            if lease.num_nameless == 0:
                return
            if name in self._owners or name in self._cached:
                continue
            lease.num_nameless -= 1
            self._num_nameless -= 1
            lease.names.append(name)
            self._owners[name] = 1
            if self._removed.pop(name, self) is self:
                self._stored[name] = None

    def free(self, lease: Lease) -> None:
        """The request is over; what it computed stays as long as there is room."""
        self._num_nameless -= lease.num_nameless
        # Reversed: the end of a prompt is worth nothing without its start.
        for name in reversed(lease.names):
            self._owners[name] -= 1
            if not self._owners[name]:
                del self._owners[name]
                self._cached[name] = None
        lease.names, lease.num_nameless = [], 0

    def drain_events(self) -> tuple[list[BlockName], list[BlockName]]:
        """Names stored and removed since the last call."""
        events = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return events

    def all_names(self) -> list[BlockName]:
        """Everything that can be found."""
        return [*self._owners, *self._cached]

    def _evict(self) -> None:
        name, _ = self._cached.popitem(last=False)
        if self._stored.pop(name, self) is self:
            self._removed[name] = None

    def check_integrity(self) -> None:
        """Assert that no block is lost or counted twice."""
        assert self._num_nameless >= 0, self._num_nameless
        assert self.num_free >= 0, self.num_free
        assert all(count > 0 for count in self._owners.values())
        assert not self._owners.keys() & self._cached.keys(), "a block is used and cached"
        assert not self._stored.keys() & self._removed.keys(), "a block is stored and removed"
