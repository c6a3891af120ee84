"""Options that several commands have, each said once."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file; see deploy/local.yaml."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Set one key; repeatable. Wins over RELEVO__SECTION__KEY, the file and the default.",
    ),
]
Url = Annotated[
    str, typer.Option(envvar="RELEVO_URL", help="Where the cluster's HTTP front listens.")
]
ApiKey = Annotated[
    str, typer.Option(envvar="RELEVO_API_KEY", help="API key, when the server asks for one.")
]
NumbersFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers there.")
]
PicturesFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Draw PNG pictures there.")
]
DEFAULT_URL = "http://127.0.0.1:8000"
