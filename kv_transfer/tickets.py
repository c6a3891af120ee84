"""The order of operations on one link: the decode side numbers them, the prefill side checks.

NCCL ignores tags, so two sides that post in different orders would exchange the wrong bytes. Hence
one issuer, one ticket open at a time, and only GRANTED uses it:

    decode   fetch A, ticket 0   fetch B, ticket 1   fetch B, ticket 1   fetch C, ticket 2
    prefill  GRANTED             NOT_YET             GRANTED             ...
    posted   A                                       B
"""

from dataclasses import replace
from enum import StrEnum

from kv_transfer.control import FetchOrder, FetchVerdict


class TicketIssuer:
    """Decode side. Invariant: an order is settled before the next one is made."""

    def __init__(self) -> None:
        self.open_order: FetchOrder | None = None
        self._next_ticket = 0

    def issue(self, order: FetchOrder) -> FetchOrder:
        """Number an order; a repeat of it must carry the same content until it is settled."""
        assert self.open_order is None, f"{self.open_order} is not settled"
        self.open_order = replace(order, ticket=self._next_ticket)
        return self.open_order

    def settle(self, verdict: FetchVerdict) -> None:
        """Take the verdict; an order whose outcome stays unknown is never settled: the link
        ends."""
        assert self.open_order is not None, "no order is open"
        if verdict is FetchVerdict.GRANTED:
            self._next_ticket += 1
        self.open_order = None


class TicketCheck(StrEnum):
    """What an order means for the prefill side's order of operations."""

    NEXT = "next"
    # the last granted order again: answer it again, post nothing
    REPEAT = "repeat"
    # long answered: it changes nothing
    STALE = "stale"
    # the two sides disagree about what was granted: the link must end
    CONFLICT = "conflict"


class TicketGate:
    """Prefill side. Invariant: operations are posted in the order of their tickets, without
    gaps."""

    def __init__(self) -> None:
        self._last_granted: FetchOrder | None = None
        self._next_ticket = 0

    def check(self, order: FetchOrder) -> TicketCheck:
        """Compare an order with what was granted so far; changes nothing."""
        if order.ticket == self._next_ticket:
            return TicketCheck.NEXT
        if order.ticket == self._next_ticket - 1:
            # with other content the decode side believes that its last order was not granted
            return TicketCheck.REPEAT if order == self._last_granted else TicketCheck.CONFLICT
        return TicketCheck.STALE if order.ticket < self._next_ticket else TicketCheck.CONFLICT

    def grant(self, order: FetchOrder) -> None:
        """Use the ticket: both sides post this operation."""
        assert order.ticket == self._next_ticket, f"{order} is out of turn"
        self._last_granted = order
        self._next_ticket += 1
