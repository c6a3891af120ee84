"""`relevo doctor` as the command line shows it; what it does is in `doctor.py`."""

import importlib
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="YAML file of the cluster."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Set one key of it; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what would keep a cluster from serving here, and say what to do about it.

    The exit status is 1 when something is a problem.
    """
    module = importlib.import_module("cluster.doctor")
    raise typer.Exit(module.run(config, assignments or [], as_json=as_json))
