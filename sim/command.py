"""`relevo sim`: what a cluster would do with a trace, on paper."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from sim.cluster import ClusterSpec, Kill, Run
from sim.experiment import best_split, compare, find_saturation, search_split
from sim.hardware import load_hardware
from sim.plots import draw_comparison, draw_latencies, draw_splits
from sim.policies import POLICIES
from sim.report import Objectives, Report, make_report
from sim.scaling_command import show_scaling
from sim.synthetic import Shape, make_trace
from sim.trace import Trace, ideal_hit_rate, read_trace

SYNTHETIC = "synthetic"
WIDE = 180  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """What was asked for, as the command line gives it."""

    trace: str
    num_requests: int
    prefill: int
    decode: int
    search_split: bool
    autoscale: bool
    rate: float | None
    load: float | None
    policies: Sequence[str]
    hardware: str
    model: str
    ttft_s: float
    tpot_ms: float
    block_size: int
    routers: int
    kills: Sequence[str]
    seed: int
    json_file: Path | None
    plots: Path | None


def run(settings: SimSettings) -> int:
    """Simulate and print; the exit status."""
    # Into a file or a pipe the table goes in full.
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    try:
        _run(settings, console)
    except (ValueError, OSError) as error:
        print(f"relevo sim: {error}", file=sys.stderr)  # noqa: T201 - the command's own output
        return 2
    return 0


def _run(settings: SimSettings, console: Console) -> None:
    _check(settings)
    objectives = Objectives(ttft_s=settings.ttft_s, tpot_s=settings.tpot_ms / 1000.0)
    spec, trace = _make_spec(settings), _load_trace(settings)
    trace = _at_asked_rate(trace, spec, settings, console)
    console.print(
        f"{trace.name}: {len(trace.requests)} requests at {trace.rate:.2f}/s, at best "
        f"{ideal_hit_rate(trace):.0%} of their prompt tokens cached; {settings.model} on "
        f"{settings.hardware}; good: TTFT <= {objectives.ttft_s:g} s, TPOT <= "
        f"{settings.tpot_ms:g} ms"
    )
    num_too_long = sum(each.num_tokens > spec.max_request_tokens for each in trace.requests)
    if num_too_long:
        console.print(
            f"{num_too_long} of them are longer than the {spec.max_request_tokens} tokens that a "
            "worker can hold: refused, hence not good"
        )
    if settings.autoscale:
        scaled = show_scaling(spec, trace, objectives, console, seed=settings.seed)
        _write_json(settings, {"scaling": [report.to_dict() for report in scaled]})
    elif settings.search_split:
        _search(settings, spec, trace, objectives, console)
    else:
        _compare(settings, spec, trace, objectives, console)


def _check(settings: SimSettings) -> None:
    """Rather now than after minutes."""
    policies = settings.policies or POLICIES
    if unknown := [name for name in policies if name not in POLICIES]:
        raise ValueError(f"Got policy {unknown[0]!r} but expected one of {', '.join(POLICIES)}")
    file = settings.json_file
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ValueError(f"Got --json {file} but expected a file in a folder that exists")
    if settings.autoscale and settings.prefill < 1:
        raise ValueError("Got --prefill 0 but --autoscale grows both pools from one worker")
    if settings.plots is not None:
        settings.plots.mkdir(parents=True, exist_ok=True)


def _make_spec(settings: SimSettings) -> ClusterSpec:
    return ClusterSpec(
        num_prefill=settings.prefill,
        num_decode=settings.decode,
        hardware=load_hardware(settings.hardware, model=settings.model),
        block_size=settings.block_size,
        num_routers=settings.routers,
        kills=[_parse_kill(text) for text in settings.kills],
    )


def _parse_kill(text: str) -> Kill:
    worker_id, _, at = text.partition("@")
    try:
        return Kill(worker_id=worker_id, at_s=float(at))
    except ValueError:
        raise ValueError(f"Got --kill {text!r} but expected WORKER@SECONDS") from None


def _load_trace(settings: SimSettings) -> Trace:
    if settings.trace == SYNTHETIC:
        return make_trace(Shape(num_requests=settings.num_requests or 2000), seed=settings.seed)
    trace = read_trace(Path(settings.trace))
    return trace.first(settings.num_requests) if settings.num_requests else trace


def _at_asked_rate(
    trace: Trace, spec: ClusterSpec, settings: SimSettings, console: Console
) -> Trace:
    if settings.rate is not None:
        return trace.at_rate(settings.rate)
    if settings.load is None:
        return trace
    saturation = find_saturation(spec, trace, POLICIES[0], seed=settings.seed)
    console.print(f"saturated at {saturation:.2f} requests/s; at {settings.load:.0%} of it:")
    return trace.at_rate(settings.load * saturation)


def _compare(
    settings: SimSettings,
    spec: ClusterSpec,
    trace: Trace,
    objectives: Objectives,
    console: Console,
) -> None:
    runs: list[Run] = []
    reports: list[Report] = []
    for run in compare(spec, trace, settings.policies or POLICIES, seed=settings.seed):
        runs.append(run)
        reports.append(make_report(run, objectives))
    console.print(_table([(report.policy, report) for report in reports], "policy"))
    _write_json(settings, {"reports": [report.to_dict() for report in reports]})
    if settings.plots is not None:
        draw_latencies(runs, objectives, settings.plots / "latencies.png")
        draw_comparison(reports, settings.plots / "comparison.png")
        console.print(f"drawn to {settings.plots}/latencies.png and comparison.png")


def _search(
    settings: SimSettings,
    spec: ClusterSpec,
    trace: Trace,
    objectives: Objectives,
    console: Console,
) -> None:
    policy = (settings.policies or POLICIES)[0]
    splits = search_split(
        spec,
        trace,
        policy,
        objectives,
        num_workers=spec.num_prefill + spec.num_decode,
        seed=settings.seed,
    )
    console.print(_table([(f"{p}P {d}D", report) for p, d, report in splits], "split"))
    num_prefill, num_decode, best = best_split(splits)
    console.print(
        f"best split of {num_prefill + num_decode} workers under {policy}: {num_prefill} prefill, "
        f"{num_decode} decode, {best.goodput:.2f} good requests/s"
    )
    plain = [{"prefill": p, "decode": d, **report.to_dict()} for p, d, report in splits]
    _write_json(settings, {"splits": plain, "best": [num_prefill, num_decode]})
    if settings.plots is not None:
        draw_splits(splits, settings.plots / "splits.png")
        console.print(f"drawn to {settings.plots}/splits.png")


COLUMNS = (
    "good",
    "good/s",
    "TTFT p50",
    "p90",
    "p99 s",
    "TPOT p50",
    "p90",
    "p99 ms",
    "cached",
    "local",
    "P max/mean",
    "D max/mean",
    "replays",
    "router µs",
)


def _table(rows: Sequence[tuple[str, Report]], what: str) -> Table:
    table = Table(what, *COLUMNS, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, report in rows:
        ttft, tpot = report.ttft_s, report.tpot_s
        table.add_row(
            name,
            f"{report.good_share:.1%}",
            f"{report.goodput:.2f}",
            f"{ttft.p50:.2f}",
            f"{ttft.p90:.2f}",
            f"{ttft.p99:.2f}",
            *(f"{value * 1000.0:.1f}" for value in (tpot.p50, tpot.p90, tpot.p99)),
            f"{report.hit_rate:.1%}",
            f"{report.local_share:.0%}",
            f"{report.prefill_imbalance:.2f}",
            f"{report.decode_imbalance:.2f}",
            str(report.num_replays),
            f"{report.choosing_us + report.state_us:.0f}",
        )
    return table


def _write_json(settings: SimSettings, results: dict[str, object]) -> None:
    if settings.json_file is not None:
        asked = {**asdict(settings), "json_file": None, "plots": None}
        body = orjson.dumps({"settings": asked, **results}, option=orjson.OPT_INDENT_2)
        settings.json_file.write_bytes(body + b"\n")
