"""What a run of scenarios says at its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.load import Answer
from tests.chaos.scenario import Stage


@dataclass(slots=True)
class Report:
    """Adds up scenarios. All durations in seconds."""

    lines: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_failed: int = 0  # where a spare worker existed
    recoveries_s: list[float] = field(default_factory=list)  # of each stream hit, at the blow
    stalls_s: list[float] = field(default_factory=list)  # its longest ones
    quiets_s: list[float] = field(default_factory=list)

    def add(self, stage: Stage) -> None:
        """Count one scenario."""
        failed = [answer for answer in stage.all_answers if is_lost(stage, answer)]
        recoveries_s = stage.recoveries_s
        stalls_s = [answer.longest_stall_s for answer in stage.affected]
        self.num_requests += len(stage.all_answers)
        self.num_failed += len(failed)
        self.recoveries_s += recoveries_s
        self.stalls_s += stalls_s
        self.quiets_s.append(stage.quiet_after_s)
        refused = sum(answer.is_refused for answer in stage.all_answers)
        self.lines.append(
            f"{'+'.join(stage.scenario.rows):10} {stage.scenario.name}:"
            f" {len(stage.all_answers)} requests, {len(failed)} failed, {refused} refused,"
            f" {len(stalls_s)} hit, recovered in {max(recoveries_s, default=0.0):.2f} s,"
            f" longest stall {max(stalls_s, default=0.0):.2f} s,"
            f" quiet after {stage.quiet_after_s:.2f} s"
        )

    def text(self) -> str:
        """All of it, a line a scenario, and the sums."""
        times_s, longest_s = self.recoveries_s, max(self.stalls_s, default=0.0)
        return "\n".join(
            [
                *self.lines,
                f"requests {self.num_requests}, failed {self.num_failed} (must be 0)",
                f"recovery time of {len(times_s)} streams: p50 {quantile(times_s, 0.5):.2f} s,"
                f" p99 {quantile(times_s, 0.99):.2f} s; their longest stall {longest_s:.2f} s",
                f"pools quiet after {max(self.quiets_s, default=0):.2f} s at most",
            ]
        )


def is_lost(stage: Stage, answer: Answer) -> bool:
    """Whether it failed though nothing doomed it and a spare worker was there."""
    is_doomed = answer.label in stage.scenario.may_fail or not stage.scenario.has_spare
    is_allowed = answer.is_refused and stage.scenario.may_refuse
    return not answer.is_complete and not is_doomed and not is_allowed


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def slope_per_hour(samples: Sequence[tuple[float, float]]) -> float:
    """Least squares through (seconds, value)."""
    count = len(samples)
    mean_x = sum(x for x, _ in samples) / count
    mean_y = sum(y for _, y in samples) / count
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    if not spread:
        return 0.0
    return 3600.0 * sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread
