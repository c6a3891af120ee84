"""`relevo bench` as the command line shows it; what it does is in `load_generator/command.py`."""

import importlib
from pathlib import Path
from typing import Annotated

import typer


def bench(
    contract: Annotated[Path, typer.Argument(help="YAML file; see deploy/contracts/demo.yaml.")],
    url: Annotated[
        str, typer.Option(envvar="RELEVO_URL", help="Any OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(envvar="RELEVO_API_KEY", help="API key, when the server asks for one.")
    ] = "",
    may_kill: Annotated[
        bool,
        typer.Option("--may-kill", help="Kill a worker on this machine where the contract says."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers there.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw PNG pictures there.")
    ] = None,
) -> None:
    """Put a contract's load on a server; exit status 0: met, 1: not met, 2: cannot be tried.

    relevo bench deploy/contracts/demo.yaml --json numbers.json --plots pictures
    """
    module = importlib.import_module("load_generator.command")
    settings = module.BenchSettings(
        contract=contract,
        url=url,
        api_key=api_key,
        may_kill=may_kill,
        json_file=json_file,
        plots=plots,
    )
    raise typer.Exit(module.run(settings))
