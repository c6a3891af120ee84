"""`relevo batch` as the command line shows it; what it does is in `batch/command.py`."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_options import DEFAULT_URL, ApiKey


def batch(  # noqa: PLR0913, PLR0917 - what one may ask for, as typer reads it
    source: Annotated[Path, typer.Argument(metavar="IN", help="JSON lines of OpenAI's Batch API.")],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="Answers; one that exists is gone on with.")
    ],
    url: Annotated[
        str, typer.Option(envvar="RELEVO_URL", help="Any OpenAI-compatible server.")
    ] = DEFAULT_URL,
    api_key: ApiKey = "",
    priority: Annotated[
        int,
        typer.Option(help="Where a request has none: higher waits for lower. 0: send none."),
    ] = 100,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Most requests at once.")] = 64,
    patience: Annotated[
        float, typer.Option(min=0.0, help="Seconds without any answer until it gives up.")
    ] = 600.0,
) -> None:
    """Run a file of requests beside online traffic; exit status 1: not done, or some failed.

    relevo batch requests.jsonl answers.jsonl
    """
    module = importlib.import_module("batch.command")
    settings = module.BatchSettings(
        source=source,
        output=output,
        url=url,
        api_key=api_key,
        priority=priority,
        max_concurrency=max_concurrency,
        patience_s=patience,
    )
    raise typer.Exit(module.run(settings))
