"""The `relevo` command. Each command's own module is imported when it runs: `--help` stays fast."""

import importlib
from typing import Annotated, Any

import typer

from cluster.cli_batch import batch
from cluster.cli_bench import bench
from cluster.cli_deploy import deploy, rollback
from cluster.cli_doctor import doctor
from cluster.cli_options import DEFAULT_URL, ApiKey, Assignments, ConfigFile, Url
from cluster.cli_plan import plan
from cluster.cli_sim import sim

app = typer.Typer(
    name="relevo",
    help="Ray-distributed, disaggregated LLM serving: prefill and decode pools, one trace.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # importing rich costs a third of the time `--help` may take
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    help="Show or check the configuration.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(config_app, name="config")
app.command()(deploy)
app.command()(rollback)
app.command()(doctor)
app.command()(plan)
app.command()(sim)
app.command()(bench)
app.command()(batch)


@app.command()
def serve(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Start a cluster and serve until Ctrl-C."""
    raise typer.Exit(_load("cluster.launcher").serve(config, assignments or []))


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    quick: Annotated[
        str, typer.Option("--quick", "-q", metavar="MESSAGE", help="Ask once and leave.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0 is greedy; small models need little.")
    ] = 0.2,
    stats: Annotated[bool, typer.Option("--stats", help="Show times after each answer.")] = False,
) -> None:
    """Talk to the served model; Ctrl-D ends."""
    module = _load("cluster.chat")
    settings = module.ChatSettings(
        url=url,
        api_key=api_key,
        max_tokens=max_tokens,
        temperature=temperature,
        stats=stats,
    )
    raise typer.Exit(module.run(settings, quick=quick))


@app.command()
def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as it comes.")] = False,
) -> None:
    """Show the workers, their KV blocks and links."""
    raise typer.Exit(_load("cluster.status").run(url, api_key=api_key, as_json=as_json))


@app.command()
def top(url: Url = DEFAULT_URL, api_key: ApiKey = "") -> None:
    """Watch traffic, workers, links and routes live; Ctrl-C ends."""
    raise typer.Exit(_load("cluster.top").run(url, api_key=api_key))


@app.command()
def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID", help="The answer's id, its X-Request-Id, or a trace id."
        ),
    ],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the spans as they come.")] = False,
) -> None:
    """Show where the time of one of the last requests went."""
    raise typer.Exit(_load("cluster.trace").run(url, request_id, api_key=api_key, as_json=as_json))


@config_app.command("show")
def config_show(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Print every key with the value that would be used."""
    raise typer.Exit(_load("cluster.config_command").show(config, assignments or []))


@config_app.command("validate")
def config_validate(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Check the configuration; one line and a non-zero exit when it is wrong."""
    raise typer.Exit(_load("cluster.config_command").validate(config, assignments or []))


def _load(name: str) -> Any:
    return importlib.import_module(name)


def main() -> None:
    """Entry point of the console script."""
    app()
