"""Reads a model as transformers has it: from safetensors, without anybody else's code.

Weights come through mmap. Where the model computes in the dtype they are stored in, its parameters
are the file's own pages: all workers of a node share them, and loading costs no second copy. So are
those of a bfloat16 checkpoint that computes through our compiled library (widening.py).
On a CPU that computes in a wider dtype without it they share a copy that was converted once
(widened_weights.py); in all other cases each worker makes its own, tensor by tensor.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import ATTENTION_NAME, register_attention
from engine.config import EngineConfig
from engine.load_progress import showing_progress
from engine.precision import Precision
from engine.servable import refuse_unservable
from engine.widened_weights import shared_copy
from engine.widening import is_mostly_linear, keep_narrow


def load_config(config: EngineConfig) -> Any:
    """The model's own configuration; ValueError in one line when it cannot be served."""
    directory = Path(config.model_path)
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        raise ValueError(
            f"Got {config.model_path = } but expected *.safetensors in it: "
            f"{f'pickled weights such as {pickled[0]} can run code' if pickled else 'it has none'}"
        )
    model_config = _load(AutoConfig, config)
    refuse_unservable(model_config)
    return model_config


def load_model(config: EngineConfig, precision: Precision, device: torch.device) -> Any:
    """The model with its weights, ready to run on `device` through paged attention."""
    register_attention()
    # Experts are computed by a grouped kernel, which torch lacks in float64.
    experts = {"experts_implementation": "eager"} if precision.dtype is torch.float64 else {}
    is_narrow = precision.is_narrow
    with showing_progress(config.model_id or config.model_path):
        model = _load(
            AutoModelForCausalLM,
            config,
            path=config.model_path if is_narrow else _weights_path(config, precision.dtype, device),
            dtype=torch.bfloat16 if is_narrow else precision.dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            **experts,
        )
    # What is no plain product would become twice as large; in float32 it is that anyway.
    if is_narrow and (precision.dtype is torch.float32 or is_mostly_linear(model)):
        keep_narrow(model)
    return model.to(device).eval().requires_grad_(False)


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Every id that ends a text, as the checkpoint's generation settings say."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(sorted(set(ids)))


def _weights_path(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> str:
    directory = Path(config.model_path)
    if device.type != "cpu" or not directory.is_dir():
        return config.model_path
    return str(shared_copy(directory, dtype))


def _load(loader: Any, config: EngineConfig, *, path: str = "", **arguments: Any) -> Any:
    if config.model_revision and not Path(config.model_path).is_dir():
        arguments["revision"] = config.model_revision
    try:
        return loader.from_pretrained(
            path or config.model_path, trust_remote_code=False, **arguments
        )
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            f"Got {config.model_path = } but expected a safetensors checkpoint of a model whose "
            f"attention can be replaced: {str(error).strip().splitlines()[0]}"
        ) from error
