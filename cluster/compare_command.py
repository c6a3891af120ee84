"""`relevo bench --compare`: the same contract aggregated and disaggregated; does separation pay?

Both have the same number of workers: decode workers that prefill too, or a prefill and a decode
pool with a hand-over of every prompt. Clusters that are started here run side by side and are
used in turn; the idle one's workers sleep.
"""

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from cluster.server_process import ServerProcess, free_ports
from load_generator.command import (
    MET,
    NOT_MET,
    REFUSED,
    check_outputs,
    keep,
    open_console,
    saying,
)
from load_generator.comparison import decide, run_in_turn, side_by_side
from load_generator.contract import Contract, read_contract
from load_generator.tables import print_results
from load_generator.target import Target, TargetError
from load_generator.trial import PhaseResult

AGGREGATED, DISAGGREGATED = "aggregated", "disaggregated"
READY_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """What was asked for, as the command line gives it."""

    contract: Path
    urls: Sequence[str] = ()  # of both, where they run already
    api_key: str = ""
    split: str = "1:1"  # prefill and decode workers
    assignments: Sequence[str] = ()  # --set of both clusters
    rounds: int = 2
    may_kill: bool = False
    json_file: Path | None = None
    plots: Path | None = None


def run(settings: CompareSettings) -> int:
    """Compare and print; the exit status is that of the better one."""
    console = open_console()
    try:
        contract = read_contract(settings.contract)
        check_outputs(settings.json_file, settings.plots)
        with _targets(settings, console) as targets:
            work = run_in_turn(
                contract,
                targets,
                rounds=settings.rounds,
                may_kill=settings.may_kill,
                say=saying(console),
            )
            trials = uvloop.run(work)
    except (ValueError, RuntimeError, TargetError) as error:
        print(f"relevo bench: {error}", file=sys.stderr)  # noqa: T201 - the command's own output
        return REFUSED
    return _conclude(settings, contract, trials, console)


@contextlib.contextmanager
def _targets(settings: CompareSettings, console: Console) -> Iterator[dict[str, Target]]:
    names = (AGGREGATED, DISAGGREGATED)
    if settings.urls:
        if len(settings.urls) != 2:
            raise ValueError("--compare takes the url of an aggregated and of a disaggregated one")
        pairs = zip(names, settings.urls, strict=True)
        yield {name: Target(url, api_key=settings.api_key) for name, url in pairs}
        return
    clusters = assignments_of(settings.split, settings.assignments)
    folder = Path(tempfile.mkdtemp(prefix="relevo-bench-"))
    console.print(f"starting two clusters; their logs are in {folder}", markup=False)
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, assignments in clusters.items():
            http_port, grpc_port = free_ports(2)
            command = serve_command(assignments, http_port=http_port, grpc_port=grpc_port)
            process = ServerProcess(command, log=folder / f"{name}.log")
            servers[name] = (stack.enter_context(process), f"http://127.0.0.1:{http_port}")
        for process, url in servers.values():
            process.wait_until_ready(url, "/ready", within_s=READY_WITHIN_S)
        yield {name: Target(url) for name, (_, url) in servers.items()}


def assignments_of(split: str, common: Sequence[str]) -> dict[str, list[str]]:
    """What is set for each of the two; ValueError for a split that is none."""
    found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", split)
    if found is None:
        raise ValueError(f"got --split {split!r} but expected PREFILL:DECODE, such as 1:1")
    num_prefill, num_decode = int(found[1]), int(found[2])
    return {
        AGGREGATED: [
            "prefill.replicas=0",
            f"decode.replicas={num_prefill + num_decode}",
            *(each for each in common if not each.startswith("router.local_prefill=")),
        ],
        DISAGGREGATED: [
            f"prefill.replicas={num_prefill}",
            f"decode.replicas={num_decode}",
            "router.local_prefill=never",
            *common,
        ],
    }


def serve_command(assignments: Sequence[str], *, http_port: int, grpc_port: int) -> list[str]:
    """The command line of a cluster on these ports."""
    ports = (f"ingress.http_port={http_port}", f"ingress.grpc_port={grpc_port}")
    sets = [part for each in (*assignments, *ports) for part in ("--set", each)]
    return [str(Path(sys.executable).with_name("relevo")), "serve", *sets]


def _conclude(
    settings: CompareSettings,
    contract: Contract,
    trials: Mapping[str, Sequence[PhaseResult]],
    console: Console,
) -> int:
    print_results(console, trials)
    rows = side_by_side(trials)
    table = Table("phase", "", AGGREGATED, DISAGGREGATED, "ratio", box=None)
    for row in rows:
        numbers = (row[AGGREGATED], row[DISAGGREGATED], row["ratio"])
        table.add_row(row["phase"], row["what"], *(_show(number) for number in numbers))
    console.print(table)
    decision = decide(trials)
    verdict = {DISAGGREGATED: "separation pays", AGGREGATED: "separation does not pay"}.get(
        decision.better, "separation makes no difference"
    )
    console.print(f"{verdict} for this contract: {decision.reason}", markup=False, highlight=False)
    extra = {"comparison": {"verdict": verdict, "reason": decision.reason, "rows": rows}}
    keep(trials, contract, settings.json_file, settings.plots, extra=extra)
    is_met = any(all(result.is_met for result in results) for results in trials.values())
    return MET if is_met else NOT_MET


def _show(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"
