"""Pictures of a trial: who waited how long, and when."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from load_generator.contract import Contract
from load_generator.outcome import Ending
from load_generator.report import PhaseReport
from load_generator.trial import PhaseResult
from sim.figures import pyplot, save

TITLES = {"ttft_ms": "TTFT (ms)", "tpot_ms": "TPOT (ms)", "e2e_ms": "whole answer (ms)"}


def draw_latencies(
    trials: Mapping[str, Sequence[PhaseResult]], contract: Contract, path: Path
) -> None:
    """Which share of the requests stayed below each latency: a row for each phase."""
    plt = pyplot()
    rows = len(contract.phases)
    figure, axes = plt.subplots(rows, 3, figsize=(14, 3.2 * rows), squeeze=False, sharey=True)
    for row, phase in enumerate(contract.phases):
        slo = contract.slo_of(phase)
        for axis, (metric, title) in zip(axes[row], TITLES.items(), strict=True):
            for name, results in trials.items():
                _draw_share(axis, results[row].report, metric, name)
            if (limit := slo.longest(metric)) is not None:
                axis.axvline(limit, color="black", linestyle=":", label="limit")
            axis.set_xlabel(title)
            axis.grid(alpha=0.3)
        axes[row][0].set_ylabel(phase.title)
        axes[row][0].legend(fontsize=8, loc="upper left")
    save(figure, path)


def _draw_share(axis: Any, report: PhaseReport, metric: str, name: str) -> None:
    values = getattr(report.latencies, metric).sorted
    if len(values):
        axis.plot(values, [(n + 1) / len(values) for n in range(len(values))], label=name)
        axis.set_xscale("log")


def draw_course(trials: Mapping[str, Sequence[PhaseResult]], path: Path) -> None:
    """TTFT of each request at the time it was due; crosses have failed."""
    plt = pyplot()
    columns = max(len(results) for results in trials.values())
    figure, axes = plt.subplots(1, columns, figsize=(5 * columns, 3.6), squeeze=False)
    for name, results in trials.items():
        for axis, result in zip(axes[0], results, strict=True):
            _draw_requests(axis, result.report, name)
            axis.set_title(result.report.title, fontsize=10)
            axis.set_xlabel("due (s)")
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("TTFT (ms)")
    axes[0][0].legend(fontsize=8, loc="upper left")
    save(figure, path)


def _draw_requests(axis: Any, report: PhaseReport, name: str) -> None:
    start_s = min(each.due_s for each in report.outcomes)
    seen = [
        (each.due_s - start_s, 1e3 * each.ttft_s)
        for each in report.outcomes
        if each.ttft_s is not None and each.ending is not Ending.FAILED
    ]
    points = axis.scatter(*zip(*seen, strict=True), s=9, label=name) if seen else None
    failed = [each.due_s - start_s for each in report.outcomes if each.has_failed]
    color = points.get_facecolor()[0] if points is not None else "red"
    axis.scatter(failed, [1.0] * len(failed), marker="x", color=color)
