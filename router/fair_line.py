"""Who is next: by priority class, then fairly between tenants, then in order of arrival.

    class 0 ── tenant a: ■ ■ ■      the tenant that was served the fewest tokens is next
            └─ tenant b: ■
    class 1 ── tenant a: ■ ■        only when no request of a better class waits

Plain data: no event loop, no clock. A tenant's count is of tokens, prompt and expected output, so
one with long requests does not get more than one with many short ones. Who comes back after a
pause starts level with the least served one that waits: idle time is not saved up.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

MAX_TENANTS_REMEMBERED = 1024


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ticket(Generic[ItemT]):
    """One request that waits."""

    item: ItemT
    tenant: str
    priority: int  # the class: 0 goes first
    num_tokens: int


@dataclass(slots=True)
class _Class(Generic[ItemT]):
    lines: dict[str, deque[Ticket[ItemT]]] = field(default_factory=dict)
    num_waiting: int = 0
    num_tokens: int = 0  # of those who wait


class FairLine(Generic[ItemT]):
    """Owns the order of those who wait.

    Invariants: a class has at most `limit` tickets; a tenant has a line only while it waits.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _Class[ItemT]] = {}
        self._served: OrderedDict[str, float] = OrderedDict()  # tokens, by tenant

    def __len__(self) -> int:
        return sum(each.num_waiting for each in self._classes.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of all who wait."""
        return sum(each.num_tokens for each in self._classes.values())

    def num_waiting(self, priority: int) -> int:
        """Tickets of one class."""
        return self._classes[priority].num_waiting if priority in self._classes else 0

    def num_before(self, priority: int) -> int:
        """Tickets a new one of this class may have to let pass."""
        return sum(c.num_waiting for number, c in self._classes.items() if number <= priority)

    def refuses(self, tenant: str, priority: int, *, limit: int) -> bool:
        """Whether `add` would return a new ticket of this tenant and class itself."""
        waiting = self._classes.get(priority)
        if waiting is None or waiting.num_waiting < limit:
            return waiting is None and limit < 1
        num_own = len(waiting.lines.get(tenant, ())) + 1
        return num_own >= max(map(len, waiting.lines.values()))

    def add(self, ticket: Ticket[ItemT], *, limit: int) -> Ticket[ItemT] | None:
        """Let a ticket wait. Over the limit somebody must go: return who, maybe this ticket.

        It is the last of the tenant with the most waiting, so a flood drowns only its own.
        """
        waiting = self._classes.setdefault(ticket.priority, _Class())
        if ticket.tenant not in waiting.lines:
            self._level(ticket.tenant)
        line = waiting.lines.setdefault(ticket.tenant, deque())
        line.append(ticket)
        waiting.num_waiting += 1
        waiting.num_tokens += ticket.num_tokens
        if waiting.num_waiting <= limit:
            return None
        longest = max(waiting.lines.values(), key=len)
        # Of equally long ones the newcomer's.
        victim = line[-1] if len(line) == len(longest) else longest[-1]
        self.remove(victim)
        return victim

    def head(self) -> Ticket[ItemT] | None:
        """Who is next."""
        if not self._classes:
            return None
        lines = self._classes[min(self._classes)].lines
        return lines[min(lines, key=lambda tenant: self._served.get(tenant, 0.0))][0]

    def remove(self, ticket: Ticket[ItemT]) -> bool:
        """It waits no more, for whatever reason; False if it did not."""
        waiting = self._classes.get(ticket.priority)
        line = waiting.lines.get(ticket.tenant) if waiting is not None else None
        if waiting is None or line is None or ticket not in line:
            return False
        line.remove(ticket)
        waiting.num_waiting -= 1
        waiting.num_tokens -= ticket.num_tokens
        if not line:
            del waiting.lines[ticket.tenant]
        if not waiting.lines:
            del self._classes[ticket.priority]
        return True

    def charge(self, tenant: str, num_tokens: float) -> None:
        """A tenant was served these; negative when it took fewer than expected."""
        self._served[tenant] = max(self._served.get(tenant, 0.0) + num_tokens, 0.0)
        self._served.move_to_end(tenant)
        while len(self._served) > MAX_TENANTS_REMEMBERED:
            self._served.popitem(last=False)

    def _level(self, tenant: str) -> None:
        others = [
            self._served.get(other, 0.0)
            for waiting in self._classes.values()
            for other in waiting.lines
        ]
        if others:
            self._served[tenant] = max(self._served.get(tenant, 0.0), min(others))

    def check_integrity(self) -> None:
        """Assert that the counts are right and nothing empty stayed."""
        for priority, waiting in self._classes.items():
            assert waiting.lines, f"class {priority} is empty"
            assert all(waiting.lines.values()), "a tenant's line is empty"
            assert waiting.num_waiting == sum(map(len, waiting.lines.values()))
            tokens = [ticket.num_tokens for line in waiting.lines.values() for ticket in line]
            assert waiting.num_tokens == sum(tokens)
