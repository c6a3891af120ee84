"""What a phase says: latencies, goodput, errors, and whether the client itself kept up."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from load_generator.contract import Slo
from load_generator.outcome import Ending, Outcome
from load_generator.percentiles import Values
from load_generator.plan import SLOW
from load_generator.run import Run

METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")
MAX_ERROR_KINDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of the completed requests of one group, in milliseconds."""

    ttft_ms: Values
    tpot_ms: Values
    itl_ms: Values  # gaps between two events of a stream
    e2e_ms: Values

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Latencies":
        """Those of the requests that have one."""
        done = [each for each in outcomes if each.ending is Ending.COMPLETED]
        gaps = (
            1e3 * (later - earlier)
            for each in done
            for earlier, later in pairwise(each.token_times_s)
        )
        return cls(
            ttft_ms=Values(1e3 * each.ttft_s for each in done if each.ttft_s is not None),
            tpot_ms=Values(1e3 * each.tpot_s for each in done if each.tpot_s is not None),
            itl_ms=Values(gaps),
            e2e_ms=Values(1e3 * each.e2e_s for each in done),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        names = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
        return {name: getattr(self, name).to_dict() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """Numbers of one phase. Slow readers, whose latencies are their own, are judged by errors."""

    title: str
    outcomes: Sequence[Outcome]
    duration_s: float
    latencies: Latencies
    groups: dict[str, Latencies]
    parts_ms: dict[str, Values]  # times that the server told, by its names
    num_completed: int
    num_cancelled: int
    num_failed: int
    num_retries: int
    num_wrong_counts: int  # completed with another number of tokens than was asked for
    num_output_tokens: int
    num_good: int
    num_judged: int  # neither cancelled nor read slowly
    errors: dict[str, int]
    client_lag_ms: Values  # how late requests left
    client_cpu_s: float
    events: Sequence[str]

    @property
    def error_rate(self) -> float:
        """Failed requests over all that were not cancelled."""
        return self.num_failed / max(self.num_failed + self.num_completed, 1)

    @property
    def good_share(self) -> float:
        """Of the judged requests."""
        return self.num_good / max(self.num_judged, 1)

    @property
    def goodput_per_s(self) -> float:
        """Good requests a second."""
        return self.num_good / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of all answers, complete or not."""
        return self.num_output_tokens / self.duration_s

    @property
    def cpu_us_per_token(self) -> float:
        """Processor time of this client for each event with tokens."""
        num_events = sum(len(each.token_times_s) for each in self.outcomes)
        return 1e6 * self.client_cpu_s / max(num_events, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with a row for each request."""
        return {
            "phase": self.title,
            "requests": len(self.outcomes),
            "completed": self.num_completed,
            "cancelled": self.num_cancelled,
            "failed": self.num_failed,
            "retries": self.num_retries,
            "wrong_token_counts": self.num_wrong_counts,
            "error_rate": round(self.error_rate, 5),
            "errors": self.errors,
            "duration_s": round(self.duration_s, 3),
            "output_tokens_per_s": round(self.output_tokens_per_s, 2),
            "goodput_per_s": round(self.goodput_per_s, 4),
            "good_share": round(self.good_share, 4),
            "latencies": self.latencies.to_dict(),
            "groups": {name: each.to_dict() for name, each in self.groups.items()},
            "server_parts_ms": {name: each.to_dict() for name, each in self.parts_ms.items()},
            "client_lag_ms": self.client_lag_ms.to_dict(),
            "client_cpu_us_per_token": round(self.cpu_us_per_token, 1),
            "events": list(self.events),
            "rows": [_row(each) for each in self.outcomes],
        }


def make_report(title: str, run: Run, slo: Slo) -> PhaseReport:
    """Add up a run."""
    outcomes = sorted(run.outcomes, key=lambda each: each.due_s)
    endings = Counter(each.ending for each in outcomes)
    judged = [
        each
        for each in outcomes
        if each.ending is not Ending.CANCELLED and each.request.group != SLOW
    ]
    names = sorted({each.request.group for each in outcomes} - {""})
    errors = Counter(each.error for each in outcomes if each.has_failed)
    completed = [each for each in outcomes if each.ending is Ending.COMPLETED]
    return PhaseReport(
        title=title,
        outcomes=outcomes,
        duration_s=max(run.duration_s, 1e-9),
        latencies=Latencies.of(judged),
        groups={
            name: Latencies.of([o for o in outcomes if o.request.group == name]) for name in names
        },
        parts_ms=_parts(completed),
        num_completed=endings[Ending.COMPLETED],
        num_cancelled=endings[Ending.CANCELLED],
        num_failed=endings[Ending.FAILED],
        num_retries=sum(max(each.num_attempts - 1, 0) for each in outcomes),
        num_wrong_counts=sum(
            each.num_output_tokens != each.request.num_output_tokens for each in completed
        ),
        num_output_tokens=sum(each.num_output_tokens for each in outcomes),
        num_good=sum(is_good(each, slo) for each in judged),
        num_judged=len(judged),
        errors=dict(errors.most_common(MAX_ERROR_KINDS)),
        client_lag_ms=Values(1e3 * (each.sent_s - each.due_s) for each in outcomes),
        client_cpu_s=run.client_cpu_s,
        events=run.events,
    )


def is_good(outcome: Outcome, slo: Slo) -> bool:
    """Completed, and within the limit of the highest percentile of each metric."""
    if outcome.ending is not Ending.COMPLETED:
        return False
    measured = {"ttft_ms": outcome.ttft_s, "tpot_ms": outcome.tpot_s, "e2e_ms": outcome.e2e_s}
    for metric, value_s in measured.items():
        limit_ms = slo.longest(metric)
        if limit_ms is not None and value_s is not None and 1e3 * value_s > limit_ms:
            return False
    return True


def _parts(completed: Sequence[Outcome]) -> dict[str, Values]:
    """The server's own times in `usage`: fields that end in _time, in seconds."""
    names = sorted({name for each in completed for name in each.usage if name.endswith("_time")})
    return {
        name: Values(
            1e3 * each.usage[name]
            for each in completed
            if isinstance(each.usage.get(name), int | float)
        )
        for name in names
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    ttft_s, tpot_s = outcome.ttft_s, outcome.tpot_s
    return {
        "due_s": round(outcome.due_s, 4),
        "group": outcome.request.group,
        "ending": outcome.ending.value,
        "error": outcome.error,
        "attempts": outcome.num_attempts,
        "prompt_tokens": outcome.num_prompt_tokens,
        "output_tokens": outcome.num_output_tokens,
        "ttft_ms": None if ttft_s is None else round(1e3 * ttft_s, 2),
        "tpot_ms": None if tpot_s is None else round(1e3 * tpot_s, 3),
        "e2e_ms": round(1e3 * outcome.e2e_s, 2),
    }
