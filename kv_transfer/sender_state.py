"""The prefill side of one hand-over as a pure machine: events in, no torch, no clock of its own.

    COMPUTING --commit--> COMMITTED --release | cancel | lease or hold over--> DRAINING --> CLOSED
        |                                                                         ^   the last
        granted
        +------------------- release | cancel | hold over ------------------------+   operation
        ended

The blocks are the transfer's until CLOSED. An operation that was granted is posted by both sides
whatever became of its transfer; tickets (`tickets.py`) keep the order of operations the same.
"""

from dataclasses import dataclass
from enum import StrEnum

from kv_transfer.control import Commit, FetchOrder, FetchVerdict, WorkerRef


class SenderState(StrEnum):
    """Where a transfer is on the prefill side."""

    COMPUTING = "computing"
    COMMITTED = "committed"
    DRAINING = "draining"
    CLOSED = "closed"


class EndCause(StrEnum):
    """Why a sender's transfer ended; only EXPIRED is somebody's fault."""

    RELEASED = "released"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderOrder:
    """What a prefill worker promised to hand over, and to whom."""

    transfer_id: int
    epoch: int
    decode_worker: WorkerRef
    num_tokens: int
    hold_s: float = 600.0
    request_label: str = ""


class SenderTransfer:
    """Holds a request's blocks for one decode worker.

    Invariant: not CLOSED while a granted operation may still read the blocks, unless the pool
    itself quarantines those; once CLOSED, or of another epoch or worker, nothing is granted any
    more.
    """

    def __init__(self, order: SenderOrder, *, lease_s: float, now: float) -> None:
        self.order = order
        self.state = SenderState.COMPUTING
        self.num_offered = 0
        # whether anything was offered, be it that no token is ready yet
        self.has_begun = False
        self.commit: Commit | None = None
        self.cause: EndCause | None = None
        self.num_granted = 0
        # the end of what was granted: the next range begins here, as a rule
        self.granted_end = 0
        self._lease_s = lease_s
        self._hold_deadline = now + order.hold_s
        # the last sign of life of the decode worker, or the commit: the lease runs from here
        self._renewed_at = now

    @property
    def is_open(self) -> bool:
        """Whether ranges may still be granted."""
        return self.state in (SenderState.COMPUTING, SenderState.COMMITTED)

    @property
    def deadline(self) -> float:
        """When `tick` is due, if nothing else happens before."""
        if self.state is SenderState.COMMITTED:
            return min(self._hold_deadline, self._renewed_at + self._lease_s)
        return self._hold_deadline

    def is_addressed_by(self, epoch: int, decode_worker: WorkerRef) -> bool:
        """Whether a message speaks of this very attempt and process."""
        return epoch == self.order.epoch and decode_worker == self.order.decode_worker

    def offer(self, num_tokens: int) -> bool:
        """More tokens are ready, or none yet but soon; False when that is no news."""
        if not self.is_open or (self.has_begun and num_tokens <= self.num_offered):
            return False
        self.has_begun = True
        self.num_offered = min(num_tokens, self.order.num_tokens)
        return True

    def finish_prefill(self, commit: Commit, now: float) -> bool:
        """Take the COMMIT; from here on the lease counts. False when there is none to take."""
        if self.state is not SenderState.COMPUTING:
            return False
        self.commit = commit
        self.num_offered = self.order.num_tokens
        self.state = SenderState.COMMITTED
        self._renewed_at = now
        return True

    def renew(self, now: float) -> None:
        """Hear from the decode worker: it opened or closed a stream, or asked for a range.

        A stream that is merely open proves nothing: the kernel of a frozen process keeps it open.
        """
        self._renewed_at = max(self._renewed_at, now)

    def fetch(self, order: FetchOrder) -> FetchVerdict:
        """Decide about one range; GRANTED counts as a running operation until `operation_ended`."""
        if not self.is_open or not self.is_addressed_by(order.epoch, order.decode_worker):
            return FetchVerdict.GONE
        if not 0 <= order.token_start < order.token_end <= self.order.num_tokens:
            return FetchVerdict.GONE
        if order.token_end > self.num_offered:
            return FetchVerdict.NOT_YET
        self.num_granted += 1
        self.granted_end = max(self.granted_end, order.token_end)
        return FetchVerdict.GRANTED

    def operation_ended(self) -> None:
        """A granted operation will not read the blocks any more."""
        self.num_granted -= 1
        assert self.num_granted >= 0, "more operations ended than were granted"
        self._close_if_drained()

    def end(self, cause: EndCause) -> None:
        """Grant nothing any more and give the blocks back as soon as nothing reads them."""
        if self.is_open:
            self.cause = cause
            self.state = SenderState.DRAINING
            self._close_if_drained()

    def quarantine(self) -> None:
        """Close with operations running: from here on the pool keeps what they read."""
        assert self.state is SenderState.DRAINING
        self.state = SenderState.CLOSED

    def tick(self, now: float) -> None:
        """Let the lease or the hold run out."""
        if self.is_open and now >= self.deadline:
            self.end(EndCause.EXPIRED)

    def _close_if_drained(self) -> None:
        if self.state is SenderState.DRAINING and not self.num_granted:
            self.state = SenderState.CLOSED
