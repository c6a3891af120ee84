"""`relevo batch`: run a file of requests; what has an answer already is left alone."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from batch.input_file import InputFile
from batch.job import GaveUpError, Job
from batch.output_file import OutputFile
from batch.pacer import Pacer
from batch.sender import Sender

DONE, SOME_FAILED, REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What was asked for, as the command line gives it."""

    source: Path
    output: Path
    url: str
    api_key: str = ""
    priority: int = 100
    max_concurrency: int = 64
    patience_s: float = 600.0
    timeout_s: float = 3600.0


def run(settings: BatchSettings) -> int:
    """Run the batch; the exit status."""
    source = InputFile(settings.source)
    try:
        custom_ids = source.check()
        with OutputFile(settings.output) as output:
            if strangers := output.done - custom_ids:
                raise ValueError(
                    f"{settings.output} has {min(strangers)!r}, which {settings.source} has not; "
                    "name another output file"
                )
            return _run(settings, source, output, len(custom_ids))
    except ValueError as error:
        _say(str(error))
        return REFUSED


def _run(settings: BatchSettings, source: InputFile, output: OutputFile, total: int) -> int:
    if output.done:
        _say(f"{len(output.done)} of {total} requests are done already")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    end = ""
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total, completed=len(output.done))
        try:
            uvloop.run(_work(settings, source, output, lambda: progress.advance(task)))
        except GaveUpError as error:
            end = str(error)
        except KeyboardInterrupt:
            end = "stopped"
    num_done = len(output.done)
    _say(f"{num_done} of {total} requests are done, {output.num_failed} of them failed")
    if num_done < total:
        _say(f"{end}; the same command goes on with the rest")
    return DONE if num_done == total and not output.num_failed else SOME_FAILED


async def _work(
    settings: BatchSettings, source: InputFile, output: OutputFile, told: Callable[[], None]
) -> None:
    sender = Sender(
        settings.url,
        api_key=settings.api_key,
        priority=settings.priority,
        timeout_s=settings.timeout_s,
    )
    pacer = Pacer(settings.max_concurrency)
    async with sender:
        job = Job(source, output, sender, pacer, patience_s=settings.patience_s, told=told)
        await job.run()


def _say(text: str) -> None:
    print(f"relevo batch: {text}", file=sys.stderr)  # noqa: T201 - the command's own output
