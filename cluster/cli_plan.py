"""`relevo plan` as the command line shows it; what it does is in `plan_command.py` and `plan/`."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli_options import Assignments, ConfigFile


def plan(  # noqa: PLR0913, PLR0917 - what one may ask for, as typer reads it
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="Directory with a config.json, that file, or a hub id; else model.path.",
        ),
    ] = "",
    config: ConfigFile = None,
    assignments: Assignments = None,
    hardware: Annotated[
        str,
        typer.Option(help="a100, h100, h200, cpu (this machine's), or a YAML file of one's own."),
    ] = "cpu",
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Step costs from bench.sim_hardware, for this model."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers to split into two pools.")] = 8,
    input_tokens: Annotated[
        int, typer.Option("--input", min=1, help="Tokens of a usual prompt.")
    ] = 1024,
    output_tokens: Annotated[
        int, typer.Option("--output", min=1, help="Tokens of a usual answer.")
    ] = 256,
    tpot: Annotated[float, typer.Option(min=0.001, help="Slowest good time per token, in ms.")] = (
        50.0
    ),
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Of one worker for an hour: adds the costs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a PNG picture there.")
    ] = None,
) -> None:
    """Tell a model's memory, speed, split and cost on some hardware; nothing is loaded.

    Only its config.json is read; see docs/plan.md. For example:

    relevo plan /models/llama-3.1-8b --hardware h100 --input 4000 --output 300 --price 3
    """
    module = importlib.import_module("cluster.plan_command")
    settings = module.PlanSettings(
        model=model,
        config=config,
        assignments=assignments or [],
        hardware=hardware,
        measured=measured,
        workers=workers,
        num_input_tokens=input_tokens,
        num_output_tokens=output_tokens,
        tpot_ms=tpot,
        price_per_hour=price,
        as_json=as_json,
        plot=plot,
    )
    raise typer.Exit(module.run(settings))
