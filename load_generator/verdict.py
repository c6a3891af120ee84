"""Whether a phase met what the contract says of it."""

from collections.abc import Iterator
from dataclasses import dataclass

from load_generator.contract import Slo, rank_of
from load_generator.report import METRICS, PhaseReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the verdict."""

    phase: str
    what: str  # such as "ttft_ms p99"
    limit: float
    value: float | None  # None = nothing to measure, which meets nothing
    is_met: bool


def check(report: PhaseReport, slo: Slo) -> list[Check]:
    """Every limit, in the contract's order."""
    return list(_checks(report, slo))


def _checks(report: PhaseReport, slo: Slo) -> Iterator[Check]:
    for metric in METRICS:
        for percentile, limit in getattr(slo, metric).items():
            value = getattr(report.latencies, metric).at(rank_of(percentile))
            is_met = value is not None and value <= limit
            yield _check(report, f"{metric} {percentile}", limit, value, is_met)
    if slo.error_rate is not None:
        rate = report.error_rate
        yield _check(report, "error_rate", slo.error_rate, rate, rate <= slo.error_rate)
    if slo.good_share is not None:
        share = report.good_share
        yield _check(report, "good_share", slo.good_share, share, share >= slo.good_share)


def _check(
    report: PhaseReport, what: str, limit: float, value: float | None, is_met: bool
) -> Check:
    return Check(phase=report.title, what=what, limit=limit, value=value, is_met=is_met)
