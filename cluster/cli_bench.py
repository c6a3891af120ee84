"""`relevo bench` as the command line shows it; what it does is in `load_generator/command.py`."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_options import DEFAULT_URL, ApiKey, NumbersFile, PicturesFolder


def bench(  # noqa: PLR0913, PLR0917 - what one may ask for, as typer reads it
    contract: Annotated[Path, typer.Argument(help="YAML file; see deploy/contracts/demo.yaml.")],
    url: Annotated[
        list[str] | None,
        typer.Option(
            envvar="RELEVO_URL",
            help="Any OpenAI-compatible server; with --compare two, the aggregated one first.",
        ),
    ] = None,
    api_key: ApiKey = "",
    may_kill: Annotated[
        bool,
        typer.Option("--may-kill", help="Kill a worker on this machine where the contract says."),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Aggregated beside disaggregated: does separation pay?"),
    ] = False,
    split: Annotated[
        str, typer.Option(help="--compare: prefill and decode workers of the clusters it starts.")
    ] = "1:1",
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="--compare: set in both clusters."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="--compare: how often each has its turn.")] = 2,
    json_file: NumbersFile = None,
    plots: PicturesFolder = None,
) -> None:
    """Put a contract's load on a server; exit status 0: met, 1: not met, 2: cannot be tried.

    relevo bench deploy/contracts/demo.yaml --json numbers.json --plots pictures
    """
    common = {
        "contract": contract,
        "api_key": api_key,
        "may_kill": may_kill,
        "json_file": json_file,
        "plots": plots,
    }
    if compare:
        module = importlib.import_module("cluster.compare_command")
        settings = module.CompareSettings(
            urls=url or [], split=split, assignments=assignments or [], rounds=rounds, **common
        )
    else:
        module = importlib.import_module("load_generator.command")
        settings = module.BenchSettings(url=(url or [DEFAULT_URL])[0], **common)
    raise typer.Exit(module.run(settings))
