"""`relevo sim --autoscale`: what growing and shrinking pools cost, beside Serve's own policy."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from router.scaling.config import DecodeScaling, PrefillScaling, ScalingConfig
from rpc.feed_pace import FeedPace
from sim.cluster import ClusterSpec
from sim.report import Objectives
from sim.scaling import TokenSignals
from sim.scaling_experiment import (
    ScalingReport,
    cheapest_equal,
    run_fixed,
    run_scaled,
    serve_policies,
)
from sim.trace import Trace

# Decisions are taken once a second: state messages four times a second will do, and are fast.
PACE = FeedPace(min_interval_s=0.25)
COLUMNS = (
    "good",
    "TTFT p50",
    "p90 s",
    "TPOT p90 ms",
    "most P",
    "most D",
    "changes",
    "P worker-s",
    "D worker-s",
    "sum",
    "of fixed",
)


def show_scaling(
    spec: ClusterSpec, trace: Trace, objectives: Objectives, console: Console, *, seed: int
) -> list[ScalingReport]:
    """Run and print: all workers all the time, ours, and the cheapest of Serve's as good."""
    config = ScalingConfig(
        prefill=PrefillScaling(max=spec.num_prefill, ttft_s=objectives.ttft_s),
        decode=DecodeScaling(max=spec.num_decode, itl_s=objectives.tpot_s),
    )
    spec = replace(spec, pace=PACE)
    fixed = run_fixed(spec, trace, objectives, seed=seed)
    ours = run_scaled(spec, trace, TokenSignals(config=config), objectives, seed=seed)
    rivals = [
        run_scaled(spec, trace, policy, objectives, seed=seed) for policy in serve_policies(config)
    ]
    rival = cheapest_equal(rivals, ours)
    console.print(_table([fixed, ours, rival], fixed))
    console.print(
        f"{ours.worker_s / fixed.worker_s:.0%} of the worker-seconds of {spec.num_prefill} +"
        f" {spec.num_decode} workers, {ours.worker_s / rival.worker_s:.0%} of those of Serve's"
        f" policy at {rival.good_share - ours.good_share:+.1%} good requests (the best of"
        f" {len(rivals)} settings; {rival.policy} = requests a worker)"
    )
    return [fixed, ours, *rivals]


def _table(reports: Sequence[ScalingReport], fixed: ScalingReport) -> Table:
    table = Table("policy", *COLUMNS, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in reports:
        table.add_row(
            each.policy,
            f"{each.good_share:.1%}",
            f"{each.ttft_s.p50:.2f}",
            f"{each.ttft_s.p90:.2f}",
            f"{each.tpot_s.p90 * 1000.0:.1f}",
            str(each.most_prefill),
            str(each.most_decode),
            str(each.num_changes),
            f"{each.prefill_worker_s:.0f}",
            f"{each.decode_worker_s:.0f}",
            f"{each.worker_s:.0f}",
            f"{each.worker_s / fixed.worker_s:.0%}",
        )
    return table
