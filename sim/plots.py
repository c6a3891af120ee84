"""Pictures of several runs of one trace."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sim.cluster import Run
from sim.figures import pyplot, save
from sim.flight import Flight
from sim.report import Objectives, Report


def draw_latencies(runs: Sequence[Run], objectives: Objectives, path: Path) -> None:
    """Which share of the requests stayed below each TTFT and TPOT, a line for each policy."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    for run in runs:
        _draw_share(axes[0], run, lambda flight: flight.first_token_s or 0.0)
        _draw_share(axes[1], run, lambda flight: flight.time_per_output_token_s * 1000.0)
    limits = ((objectives.ttft_s, "TTFT (s)"), (objectives.tpot_s * 1000.0, "TPOT (ms)"))
    for axis, (limit, label) in zip(axes, limits, strict=True):
        axis.axvline(limit, color="black", linestyle=":", label="objective")
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests below")
    axes[0].legend()
    save(figure, path)


def _draw_share(axis: Any, run: Run, value: Callable[[Flight], float]) -> None:
    values = sorted(max(value(flight), 1e-4) for flight in run.flights if not flight.error)
    shares = [(number + 1) / len(values) for number in range(len(values))]
    axis.plot(values, shares, label=run.policy)


def draw_comparison(reports: Sequence[Report], path: Path) -> None:
    """Goodput, hit rate and balance side by side."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(15, 4))
    names = [report.policy for report in reports]
    bars = {
        "requests within both objectives": [report.good_share for report in reports],
        "prompt tokens found cached": [report.hit_rate for report in reports],
        "busiest prefill worker / mean": [report.prefill_imbalance for report in reports],
        "busiest decode worker / mean": [report.decode_imbalance for report in reports],
    }
    for axis, (title, values) in zip(axes, bars.items(), strict=True):
        axis.bar(names, values)
        axis.set_title(title, fontsize=10)
        axis.tick_params(axis="x", rotation=60)
        axis.bar_label(axis.containers[0], fmt="%.2f", fontsize=8)
    save(figure, path)


def draw_splits(reports: Sequence[tuple[int, int, Report]], path: Path) -> None:
    """Goodput by split of the workers."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5))
    axis.bar(
        [f"{num_prefill}P {num_decode}D" for num_prefill, num_decode, _ in reports],
        [report.goodput for _, _, report in reports],
    )
    axis.set_ylabel("good requests per second")
    axis.tick_params(axis="x", rotation=60)
    save(figure, path)
