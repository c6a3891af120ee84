"""`relevo doctor` as the command line shows it; what it does is in `doctor.py`."""

import importlib
from typing import Annotated

import typer

from cluster.cli_options import Assignments, ConfigFile


def doctor(
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what would keep a cluster from serving here, and say what to do about it.

    The exit status is 1 when something is a problem.
    """
    module = importlib.import_module("cluster.doctor")
    raise typer.Exit(module.run(config, assignments or [], as_json=as_json))
