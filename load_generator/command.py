"""`relevo bench`: run a contract against a server; the exit status says whether it was met."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import uvloop
from rich.console import Console

from load_generator.contract import Contract, read_contract
from load_generator.plots import draw_course, draw_latencies
from load_generator.tables import print_results
from load_generator.target import Target, TargetError
from load_generator.trial import PhaseResult, Trial, judge
from sim.figures import pyplot

MET, NOT_MET, REFUSED = 0, 1, 2
WIDE = 160  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What was asked for, as the command line gives it."""

    contract: Path
    url: str
    api_key: str = ""
    may_kill: bool = False
    json_file: Path | None = None
    plots: Path | None = None


def run(settings: BenchSettings) -> int:
    """Run the contract and print; the exit status."""
    console = open_console()
    try:
        contract = read_contract(settings.contract)
        check_outputs(settings.json_file, settings.plots)
        target = Target(settings.url, api_key=settings.api_key)
        trial = Trial(contract, target, may_kill=settings.may_kill)
        runs = uvloop.run(trial.run(saying(console)))
    except (ValueError, TargetError) as error:
        print(f"relevo bench: {error}", file=sys.stderr)  # noqa: T201 - the command's own output
        return REFUSED
    results = judge(contract, runs)
    trials = {settings.url: results}
    print_results(console, trials)
    keep(trials, contract, settings.json_file, settings.plots)
    is_met = all(result.is_met for result in results)
    console.print("contract met" if is_met else "contract NOT met")
    return MET if is_met else NOT_MET


def open_console() -> Console:
    """The terminal; into a file or a pipe a table goes in full."""
    return Console() if sys.stdout.isatty() else Console(width=WIDE)


def check_outputs(json_file: Path | None, plots: Path | None) -> None:
    """ValueError before anything is sent, if nothing could be kept of it."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ValueError(f"{json_file.parent} is no directory")
    if plots is not None:
        pyplot()


def keep(
    trials: Mapping[str, Sequence[PhaseResult]],
    contract: Contract,
    json_file: Path | None,
    plots: Path | None,
    *,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Write the numbers and draw the pictures that were asked for."""
    if json_file is not None:
        body = {
            "contract": contract.model_dump(mode="json"),
            "trials": {name: [each.to_dict() for each in trials[name]] for name in trials},
            **(extra or {}),
        }
        json_file.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        draw_latencies(trials, contract, plots / "latencies.png")
        draw_course(trials, plots / "course.png")


def saying(console: Console) -> Callable[[str], None]:
    """Print lines as they are."""
    return lambda text: console.print(text, markup=False, highlight=False)
