"""Collects what happens to one request, on one clock, and makes its report at any moment."""

from collections.abc import Callable
from dataclasses import dataclass

from relevo.v1 import common_pb2

from router.report import RequestReport


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """One attempt as the workers told of it."""

    prefill_worker_id: str  # empty: the decode worker alone
    decode_worker_id: str
    started_at_s: float
    num_cached_tokens: int = 0  # where the prompt was computed
    prefill_wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_tail_s: float = 0.0
    slot_wait_s: float = 0.0
    first_decode_s: float = 0.0
    kv_transfer_s: float = 0.0
    kv_transfer_bytes: int = 0

    def add_prefill(self, timings: common_pb2.WorkerTimings) -> None:
        """Take what the worker says that computed the prompt."""
        self.prefill_wait_s = max(self.prefill_wait_s, timings.prefill_wait_s)
        self.prefill_s = max(self.prefill_s, timings.prefill_s)

    def add_decode(self, timings: common_pb2.WorkerTimings) -> None:
        """Take what the decode worker says; it repeats itself, so keep the largest."""
        self.transfer_tail_s = max(self.transfer_tail_s, timings.transfer_tail_s)
        if not self.first_decode_s:
            # Of the choice that decodes first: its is the second token.
            self.slot_wait_s, self.first_decode_s = timings.slot_wait_s, timings.first_decode_s
        self.kv_transfer_s = max(self.kv_transfer_s, timings.kv_transfer_s)


class Timeline:
    """The history of one request. Invariant: moments only move forward."""

    def __init__(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        arrived_at_s: float,
        now: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._now = now
        self.arrived_at_s = min(arrived_at_s, now())
        self.attempts: list[AttemptRecord] = []
        self.num_migrations = 0
        self.num_completion_tokens = 0
        self._queue_s = 0.0
        self._first: AttemptRecord | None = None
        self._first_at_s: float | None = None
        self._second: AttemptRecord | None = None
        self._second_at_s: float | None = None
        self._last_at_s: dict[int, float] = {}  # by choice index
        self._ended_at_s: float | None = None
        self._finish_reason = ""

    def add_queue(self, seconds: float) -> None:
        """It waited in the queue; after the first token that is no part of TTFT."""
        if self._first is None:
            self._queue_s += max(seconds, 0.0)

    def start_attempt(self, *, prefill_worker_id: str, decode_worker_id: str) -> AttemptRecord:
        """Legs are about to open."""
        record = AttemptRecord(
            prefill_worker_id=prefill_worker_id,
            decode_worker_id=decode_worker_id,
            started_at_s=self._now(),
        )
        self.attempts.append(record)
        return record

    def add_tokens(self, num_tokens: int, record: AttemptRecord, *, choice_index: int = 0) -> None:
        """New tokens of a choice arrived; the earliest of any choice count as first and second."""
        now_s = self._now()
        self.num_completion_tokens += num_tokens
        if choice_index not in self._last_at_s:
            num_tokens -= 1  # each choice's first comes from the prompt
        self._last_at_s[choice_index] = now_s
        if self._first is None:
            self._first, self._first_at_s = record, now_s
        if self._second is None and num_tokens > 0:
            self._second, self._second_at_s = record, now_s

    def end(self, finish_reason: str) -> None:
        """It is over; the first end counts."""
        if self._ended_at_s is None:
            self._ended_at_s, self._finish_reason = self._now(), finish_reason

    def since_last_token_s(self, choice_index: int = 0) -> float | None:
        """Since tokens of this choice last arrived; None before the first."""
        last_at_s = self._last_at_s.get(choice_index)
        return None if last_at_s is None else self._now() - last_at_s

    @property
    def first_token_s(self) -> float | None:
        """TTFT, once there is one."""
        return None if self._first_at_s is None else self._first_at_s - self.arrived_at_s

    def report(self) -> RequestReport:
        """Everything up to now."""
        last = self.attempts[-1] if self.attempts else None
        first = self._first or last
        end_s = self._now() if self._ended_at_s is None else self._ended_at_s
        is_local = first is not None and not first.prefill_worker_id
        num_cached = min(first.num_cached_tokens, self._num_prompt_tokens) if first else 0
        queue_s, route_s, prefill_wait_s, prefill_s, wire_s = self._first_token_parts()
        transfer_tail_s, slot_wait_s, first_decode_s, second_wire_s = self._second_token_parts()
        return RequestReport(
            request_id=self.request_id,
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens,
            cached_prefill=0 if is_local else num_cached,
            cached_decode=num_cached if is_local else 0,
            computed=self._num_prompt_tokens - num_cached,
            queue_s=queue_s,
            route_s=route_s,
            prefill_wait_s=prefill_wait_s,
            prefill_s=prefill_s,
            wire_s=wire_s,
            first_token_s=self.first_token_s,
            second_token_s=self._since_arrival(self._second_at_s),
            transfer_tail_s=transfer_tail_s,
            slot_wait_s=slot_wait_s,
            first_decode_s=first_decode_s,
            second_wire_s=second_wire_s,
            kv_transfer_s=sum(each.kv_transfer_s for each in self.attempts),
            completion_s=max(self._last_at_s.values(), default=0.0) - (self._first_at_s or 0.0),
            elapsed_s=end_s - self.arrived_at_s,
            prefill_worker_id=first.prefill_worker_id if first else "",
            decode_worker_id=first.decode_worker_id if first else "",
            last_decode_worker_id=last.decode_worker_id if last else "",
            kv_transfer_bytes=sum(each.kv_transfer_bytes for each in self.attempts),
            num_attempts=len(self.attempts),
            num_migrations=self.num_migrations,
            finish_reason=self._finish_reason,
        )

    def _since_arrival(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - self.arrived_at_s

    def _first_token_parts(self) -> tuple[float, float, float, float, float]:
        """Queue, route, prefill_wait, prefill, wire; once a token came they sum to TTFT."""
        record = self._first
        if record is None or self._first_at_s is None:
            return self._queue_s, 0.0, 0.0, 0.0, 0.0
        before_s = max(record.started_at_s - self.arrived_at_s, 0.0)
        queue_s = min(self._queue_s, before_s)
        on_workers_s = self._first_at_s - self.arrived_at_s - before_s
        (prefill_wait_s, prefill_s), wire_s = _fit(
            on_workers_s, record.prefill_wait_s, record.prefill_s
        )
        return queue_s, before_s - queue_s, prefill_wait_s, prefill_s, wire_s

    def _second_token_parts(self) -> tuple[float, float, float, float]:
        """Transfer tail, slot wait, first decode, wire: from the first token to the second."""
        record = self._second
        if record is None or self._first_at_s is None or self._second_at_s is None:
            return 0.0, 0.0, 0.0, 0.0
        (tail_s, slot_wait_s, first_decode_s), wire_s = _fit(
            self._second_at_s - self._first_at_s,
            record.transfer_tail_s,
            record.slot_wait_s,
            record.first_decode_s,
        )
        return tail_s, slot_wait_s, first_decode_s, wire_s


def _fit(whole_s: float, *told_s: float) -> tuple[tuple[float, ...], float]:
    """Make what workers told fit into what we measured; also return what they do not explain.

    A worker's clock may run a little faster than ours, and part of what it tells may lie before the
    whole: the first token was on its way to us already.
    """
    sum_s = sum(told_s)
    scale = min(1.0, whole_s / sum_s) if sum_s > 0 else 1.0
    parts_s = tuple(scale * each for each in told_s)
    return parts_s, max(whole_s - sum(parts_s), 0.0)
