"""`relevo deploy` and `rollback` as the command line shows them; see `deploy_command.py`."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_options import Assignments, ConfigFile

History = Annotated[
    Path, typer.Option(metavar="DIR", help="Where releases are kept, each by what it holds.")
]
RELEASES = Path("~/.relevo/releases")


def deploy(
    config: ConfigFile = None,
    assignments: Assignments = None,
    history: History = RELEASES,
    wait_for_nodes: Annotated[
        bool,
        typer.Option("--wait-for-nodes", help="Replace what runs though not all finds room yet."),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Replace all, for what changed in files that it only names."
        ),
    ] = False,
) -> None:
    """Deploy onto the Ray cluster of cluster.ray_address, in place, and leave it running.

    Serve replaces the replicas that would be made otherwise now, a few at a time; streams move to
    those that stay. The exact configuration is kept: `relevo rollback` goes back to the one before.
    """
    module = importlib.import_module("cluster.deploy_command")
    settings = module.HowToReplace(restarts=restart, waits_for_nodes=wait_for_nodes)
    raise typer.Exit(module.deploy(config, assignments or [], history=history, how=settings))


def rollback(
    release: Annotated[
        str, typer.Argument(metavar="[RELEASE]", help="Its digest; else the one before.")
    ] = "",
    address: Annotated[
        str, typer.Option(help="The cluster.ray_address that was deployed to.")
    ] = "auto",
    history: History = RELEASES,
    show: Annotated[bool, typer.Option("--list", help="List the releases instead.")] = False,
) -> None:
    """Deploy the last release that served before the present one, exactly as it was."""
    module = importlib.import_module("cluster.deploy_command")
    if show:
        raise typer.Exit(module.show_history(ray_address=address, history=history))
    raise typer.Exit(module.rollback(release, ray_address=address, history=history))
