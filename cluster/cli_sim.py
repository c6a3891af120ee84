"""`relevo sim` as the command line shows it; what it does is in `sim/command.py`."""

import importlib
from typing import Annotated

import typer

from cluster.cli_options import NumbersFile, PicturesFolder


def sim(  # noqa: PLR0913, PLR0917 - what one may ask for, as typer reads it
    trace: Annotated[
        str,
        typer.Argument(
            help="Mooncake .jsonl or Azure .csv file, or 'synthetic' for made-up requests."
        ),
    ] = "synthetic",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 8,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests per second; else as recorded.")
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Rate as a share of what saturates the cluster, such as 0.8."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="relevo, round-robin, least-loaded, prefix-affinity (SGLang's cache_aware) or "
            "dynamo-cost; repeatable. All of them unless given."
        ),
    ] = None,
    search_split: Annotated[
        bool,
        typer.Option("--search-split", help="Find the best split of these workers instead."),
    ] = False,
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale", help="Let both pools grow from 1 to these workers; cost and goodput."
        ),
    ] = False,
    requests: Annotated[int, typer.Option(min=0, help="Only so many; 0: all.")] = 0,
    hardware: Annotated[
        str, typer.Option(help="a100, h100, h200, or a JSON file of measured values.")
    ] = "h100",
    model: Annotated[str, typer.Option(help="llama-8b, or llama-70b on 4 GPUs a worker.")] = (
        "llama-8b"
    ),
    ttft: Annotated[float, typer.Option(min=0.0, help="Slowest good TTFT, in seconds.")] = 2.0,
    tpot: Annotated[float, typer.Option(min=0.0, help="Slowest good TPOT, in ms.")] = 50.0,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a KV block; smaller takes longer to simulate.")
    ] = 512,
    routers: Annotated[int, typer.Option(min=1, help="Ingresses that share the requests.")] = 1,
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKER@SECONDS", help="Kill a worker; repeatable: decode-0@30"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of chance, and of the made-up requests.")] = 1,
    json_file: NumbersFile = None,
    plots: PicturesFolder = None,
) -> None:
    """Simulate a cluster on a trace: the router's own code, beside other policies.

    No GPU and no model is needed; see docs/simulator.md. For example:

    relevo sim mooncake_conversation.jsonl --prefill 8 --decode 8 --load 0.8 --plots pictures
    """
    module = importlib.import_module("sim.command")
    settings = module.SimSettings(
        trace=trace,
        num_requests=requests,
        prefill=prefill,
        decode=decode,
        search_split=search_split,
        autoscale=autoscale,
        rate=rate,
        load=load,
        policies=policy or [],
        hardware=hardware,
        model=model,
        ttft_s=ttft,
        tpot_ms=tpot,
        block_size=block_size,
        routers=routers,
        kills=kill or [],
        seed=seed,
        json_file=json_file,
        plots=plots,
    )
    raise typer.Exit(module.run(settings))
