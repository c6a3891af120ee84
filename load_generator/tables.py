"""What `relevo bench` prints."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from load_generator.percentiles import Values
from load_generator.report import Latencies, PhaseReport
from load_generator.trial import PhaseResult

COLUMNS = (
    "ended",
    "failed",
    "good",
    "good/s",
    "tokens/s",
    "TTFT p50",
    "p90",
    "p99 ms",
    "TPOT p50",
    "p90",
    "p99 ms",
    "e2e p50",
    "p99 s",
)


def print_results(console: Console, trials: Mapping[str, Sequence[PhaseResult]]) -> None:
    """A row for each phase and each group in it, then every limit."""
    table = Table("phase", *COLUMNS, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, results in trials.items():
        for result in results:
            label = f"{name} {result.report.title}" if len(trials) > 1 else result.report.title
            table.add_row(label, *_numbers(result.report))
            for group, latencies in result.report.groups.items():
                table.add_row(f"  {group}", *[""] * 5, *_latencies(latencies))
    console.print(table)
    for name, results in trials.items():
        for result in results:
            _print_verdict(console, f"{name} " if len(trials) > 1 else "", result)


def _print_verdict(console: Console, name: str, result: PhaseResult) -> None:
    report = result.report
    for event in report.events:
        console.print(f"{name}{report.title}: {event}", markup=False, highlight=False)
    for error, count in report.errors.items():
        console.print(f"{name}{report.title}: {count} x {error}", markup=False, highlight=False)
    for each in result.checks:
        value = "nothing measured" if each.value is None else f"{each.value:.4g}"
        word = "met" if each.is_met else "NOT MET"
        console.print(
            f"{name}{each.phase}: {each.what} {value}, limit {each.limit:g}: {word}",
            markup=False,
            highlight=False,
        )


def _numbers(report: PhaseReport) -> list[str]:
    return [
        f"{report.num_completed}/{len(report.outcomes) - report.num_cancelled}",
        str(report.num_failed),
        f"{report.good_share:.0%}",
        f"{report.goodput_per_s:.2f}",
        f"{report.output_tokens_per_s:.1f}",
        *_latencies(report.latencies),
    ]


def _latencies(latencies: Latencies) -> list[str]:
    ttft, tpot, e2e = latencies.ttft_ms, latencies.tpot_ms, latencies.e2e_ms
    shown = [*(_show(ttft, rank) for rank in (50, 90, 99))]
    shown += [_show(tpot, rank, digits=1) for rank in (50, 90, 99)]
    return [*shown, *(_show(e2e, rank, digits=2, unit=1e-3) for rank in (50, 99))]


def _show(values: Values, rank: float, *, digits: int = 0, unit: float = 1.0) -> str:
    value = values.at(rank)
    return "-" if value is None else f"{unit * value:.{digits}f}"
