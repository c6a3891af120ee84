"""`relevo doctor`: what of this machine and configuration would keep a cluster from serving."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from api.build import this_build
from cluster import doctor_gpus, doctor_machine, doctor_nodes, doctor_site
from cluster.config import ClusterConfig, load_config
from cluster.config_sources import ConfigError
from cluster.finding import Finding, Level, has_problem, ok, problem

COLORS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


def run(file: Path | None, assignments: Sequence[str], *, as_json: bool) -> int:
    """Look at everything and say it; the exit status is 1 when something is a problem."""
    findings: list[Finding] = []
    console = Console(highlight=False, soft_wrap=True)
    for finding in examine(file, assignments):
        findings.append(finding)
        if not as_json:
            _show(finding, console)
    if as_json:
        body = {"ok": not has_problem(findings), "findings": [asdict(each) for each in findings]}
        sys.stdout.write(json.dumps(body, indent=2) + "\n")
    else:
        console.print(_summary(findings))
    return 1 if has_problem(findings) else 0


def examine(file: Path | None, assignments: Sequence[str]) -> Iterator[Finding]:
    """Everything there is to look at, the quick things first."""
    yield ok("relevo", str(this_build()))
    yield from doctor_machine.examine()
    try:
        config = load_config(file, assignments=assignments)
    except ConfigError as error:
        yield problem("config", str(error), "`relevo config show` prints every key with its value")
        config = None
    yield from doctor_gpus.examine(wants_gpu=config is not None and _wants_gpu(config))
    if config is not None:
        yield ok("config", str(file or "defaults, environment and --set"))
        yield doctor_machine.check_clock(is_alone=config.is_local)
        yield from doctor_site.examine(config)
        yield from doctor_nodes.examine(config)


def _wants_gpu(config: ClusterConfig) -> bool:
    return config.prefill.num_gpus > 0 or config.decode.num_gpus > 0


def _show(finding: Finding, console: Console) -> None:
    color = COLORS[finding.level]
    console.print(f"[{color}]{finding.level:8}[/] {finding.check:14} {escape(finding.text)}")
    if finding.advice:
        console.print(f"{'':23} [bold]→[/] {escape(finding.advice)}")


def _summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(each.level is level for each in findings) for level in Level}
    verdict = "cannot serve as it is" if counts[Level.PROBLEM] else "can serve"
    return f"{verdict}: {counts[Level.PROBLEM]} problem(s), {counts[Level.WARNING]} warning(s)"
