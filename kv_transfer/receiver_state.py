"""The decode side of one hand-over as a pure machine: events in, actions out, no torch, no clock.

    WAITING --first offer--> RESERVING --reserved--> FETCHING --all arrived and COMMIT--> DONE
        |                        |                       |
        +-- COMMIT that ended the request --> DONE       +-- any failure, cancel, deadline -->
        FAILED

The reserved blocks are the transfer's from `reserved` until DONE or FAILED. A range that was
granted still arrives after FAILED. When its operation had begun by then, it may write its blocks
until it ends, and they stay in quarantine; when not, it is thrown away.
"""

from dataclasses import dataclass
from enum import StrEnum

from kv_transfer.control import (
    Commit,
    FailureReason,
    FetchVerdict,
    TransferMessage,
)

# A range is asked for while the one before still travels, so that the link never idles for a
# control round trip.
MAX_RANGES_IN_FLIGHT = 2

# Pause before a refused fetch or a broken watch is tried again.
RETRY_S = 0.02


class ReceiverState(StrEnum):
    """Where a transfer is on the decode side."""

    WAITING = "waiting"
    RESERVING = "reserving"
    FETCHING = "fetching"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take blocks for the whole request; answer with `reserved`."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask for tokens [token_start, token_end); answer with `fetch_replied`, then arrived/failed."""

    token_start: int
    token_end: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Open the Transfer stream anew: the one before broke, or the lease has to be renewed."""


@dataclass(frozen=True, slots=True)
class Finish:
    """All KV is in the blocks and COMMIT was valid: decoding may start."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Fail:
    """The hand-over is over; the caller gives the blocks back."""

    reason: FailureReason


Action = Reserve | Fetch | Watch | Finish | Fail


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverLimits:
    """Sizes and deadlines of one transfer on the decode side."""

    num_tokens: int
    # ranges end on this grid until COMMIT, so that every block arrives with one operation
    block_size: int
    max_tokens_per_fetch: int
    # the whole transfer ends by then
    deadline: float
    # how long a broken watch may be retried before COMMIT
    control_timeout_s: float
    # pause between two signs of life after COMMIT, well below the peer's lease
    renew_s: float


class ReceiverTransfer:
    """Collects one request's KV.

    Invariant: Finish comes only after a valid COMMIT and when every token that was not cached has
    arrived; exactly one of Finish and Fail comes, and nothing after it.
    """

    def __init__(self, limits: ReceiverLimits) -> None:
        self.state = ReceiverState.WAITING
        self.commit: Commit | None = None
        self._limits = limits
        self._num_offered = 0
        # tokens [0, _num_asked) are cached, arrived, or asked for:
        # 0 ...... cached | arrived | in flight | asking | _num_asked ... _num_offered ...
        # num_tokens
        self._num_asked = 0
        self._asking: Fetch | None = None
        self._in_flight: list[Fetch] = []
        self._digests: dict[tuple[int, int], bytes] = {}
        self._retry_at = 0.0
        self._watch_at: float | None = None
        self._watch_deadline: float | None = None
        self._renew_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether Finish or Fail was returned."""
        return self.state in (ReceiverState.DONE, ReceiverState.FAILED)

    @property
    def deadline(self) -> float:
        """When `tick` is due, if nothing else happens before."""
        times = [self._limits.deadline]
        if self._watch_at is not None:
            times.append(self._watch_at)
        if self._watch_deadline is not None:
            times.append(self._watch_deadline)
        if self._renew_at is not None:
            times.append(self._renew_at)
        if self._retry_at:
            times.append(self._retry_at)
        return min(times)

    def hear(self, message: TransferMessage, now: float) -> list[Action]:
        """Take an OFFER or the COMMIT."""
        if self.is_over:
            return []
        self._watch_deadline = None
        if isinstance(message, Commit):
            return self._take_commit(message, now)
        if not 0 <= message.num_tokens <= self._limits.num_tokens:
            return self._fail(FailureReason.INVALID_COMMIT)
        self._num_offered = max(self._num_offered, message.num_tokens)
        return self._go_on(now)

    def watch_broken(self, now: float) -> list[Action]:
        """Lose the stream; it is opened again for as long as the peer may be there."""
        if self.is_over:
            return []
        self._watch_at = now + RETRY_S
        if self._watch_deadline is None and self.commit is None:
            self._watch_deadline = now + self._limits.control_timeout_s
        return []

    def not_found(self) -> list[Action]:
        """Learn that the peer has no such transfer."""
        return self._fail(FailureReason.GONE)

    def reserved(self, num_cached_tokens: int, now: float) -> list[Action]:
        """Own blocks for the whole request, of which the first tokens are present already."""
        if self.state is not ReceiverState.RESERVING:
            return []
        assert 0 <= num_cached_tokens <= self._limits.num_tokens
        self._num_asked = num_cached_tokens
        self.state = ReceiverState.FETCHING
        return self._go_on(now)

    def fetch_replied(self, fetch: Fetch, verdict: FetchVerdict, now: float) -> list[Action]:
        """Take the verdict on the range that was asked for."""
        if self.is_over:
            return []
        assert fetch == self._asking, f"{fetch} was not asked for"
        self._asking = None
        if verdict is FetchVerdict.GRANTED:
            self._in_flight.append(fetch)
            return self._go_on(now)
        self._num_asked = fetch.token_start
        if verdict is FetchVerdict.GONE:
            return self._fail(FailureReason.GONE)
        self._retry_at = now + RETRY_S
        return []

    def arrived(self, fetch: Fetch, digest: bytes, now: float) -> list[Action]:
        """Have a granted range in the blocks, with the digest of what arrived (may be empty)."""
        if self.is_over:
            return []
        self._in_flight.remove(fetch)
        if digest:
            self._digests[fetch.token_start, fetch.token_end] = digest
        return self._go_on(now)

    def fail(self, reason: FailureReason) -> list[Action]:
        """Give up: link broken, digest mismatch, cancelled, no room."""
        return self._fail(reason)

    def tick(self, now: float) -> list[Action]:
        """Let deadlines and pauses run out."""
        if self.is_over:
            return []
        if now >= self._limits.deadline:
            reserving = self.state is ReceiverState.RESERVING
            return self._fail(FailureReason.NO_ROOM if reserving else FailureReason.TIMEOUT)
        if self._watch_deadline is not None and now >= self._watch_deadline:
            return self._fail(FailureReason.CONTROL_LOST)
        actions: list[Action] = []
        if any(at is not None and now >= at for at in (self._watch_at, self._renew_at)):
            self._watch_at = None
            if self._renew_at is not None:
                self._renew_at = now + self._limits.renew_s
            actions.append(Watch())
        if self._retry_at and now >= self._retry_at:
            actions += self._go_on(now)
        return actions

    def _take_commit(self, commit: Commit, now: float) -> list[Action]:
        if self.commit is not None:
            return []
        if commit.num_tokens != self._limits.num_tokens or not commit.choices:
            return self._fail(FailureReason.INVALID_COMMIT)
        self.commit = commit
        self._renew_at = now + self._limits.renew_s
        self._num_offered = self._limits.num_tokens
        if all(choice.finish_reason for choice in commit.choices):
            # nothing will be decoded, so nothing needs to travel
            self.state = ReceiverState.DONE
            return [Finish(commit)]
        return self._go_on(now)

    def _go_on(self, now: float) -> list[Action]:
        if self.state is ReceiverState.WAITING:
            self.state = ReceiverState.RESERVING
            return [Reserve()]
        if self.state is not ReceiverState.FETCHING:
            return []
        if self._is_complete():
            return self._finish()
        if self._asking or len(self._in_flight) >= MAX_RANGES_IN_FLIGHT or now < self._retry_at:
            return []
        self._retry_at = 0.0
        return self._ask()

    def _ask(self) -> list[Action]:
        # until COMMIT only whole blocks:    | block | block | blo
        #                                    ^ _num_asked    ^ end
        grid = self._limits.block_size
        end = self._num_offered if self.commit else self._num_offered // grid * grid
        start = self._num_asked
        end = min(end, start // grid * grid + self._limits.max_tokens_per_fetch)
        if end <= start:
            return []
        self._asking = Fetch(start, end)
        self._num_asked = end
        return [self._asking]

    def _is_complete(self) -> bool:
        everything_asked = self._num_asked == self._limits.num_tokens
        return bool(self.commit) and everything_asked and not self._asking and not self._in_flight

    def _finish(self) -> list[Action]:
        assert self.commit is not None
        for theirs in self.commit.digests:
            ours = self._digests.get((theirs.token_start, theirs.token_end))
            if ours is not None and ours != theirs.digest:
                return self._fail(FailureReason.DIGEST_MISMATCH)
        self.state = ReceiverState.DONE
        return [Finish(self.commit)]

    def _fail(self, reason: FailureReason) -> list[Action]:
        if self.is_over:
            return []
        self.state = ReceiverState.FAILED
        return [Fail(reason)]
