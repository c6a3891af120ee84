"""Lists the decisions in the navigation of the site, by number: a hook of mkdocs."""

from pathlib import Path
from typing import Any


def on_config(config: Any) -> None:
    """What mkdocs calls once it has read mkdocs.yml."""
    folder = Path(config["docs_dir"]) / "adr"
    config["nav"].append(
        {"Decisions": [f"adr/{page.name}" for page in sorted(folder.glob("*.md"))]}
    )
