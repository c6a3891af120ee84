"""Reads a model as transformers has it: from safetensors, without anybody else's code.

Weights come through mmap. Where the model computes in the dtype they are stored in, its parameters
are the file's own pages: all workers of a node share them, and loading costs no second copy. So are
those of a bfloat16 checkpoint that computes in float32 through our compiled library (widening.py).
On a CPU that computes in a wider dtype without it they share a copy that was converted once
(widened_weights.py); in all other cases each worker makes its own, tensor by tensor.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import ATTENTION_NAME, register_attention
from engine.config import EngineConfig
from engine.load_progress import showing_progress
from engine.native.library import load_library
from engine.servable import refuse_unservable
from engine.widened_weights import shared_copy
from engine.widening import is_all_bfloat16, keep_narrow

logger = logging.getLogger(__name__)


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


def load_model(config: EngineConfig, model_config: Any, device: torch.device) -> Any:
    """The model with its weights, ready to run on `device` through paged attention."""
    register_attention()
    dtype = _choose_dtype(config.dtype, model_config.get_text_config(), device)
    # Experts are computed by a grouped kernel, which torch lacks in float64.
    experts = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
    is_narrow = _stays_narrow(config, dtype, device)
    with showing_progress(config.model_id or config.model_path):
        model = _load(
            AutoModelForCausalLM,
            config,
            path=config.model_path if is_narrow else _weights_path(config, dtype, device),
            dtype=torch.bfloat16 if is_narrow else dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            **experts,
        )
    if is_narrow:
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


def _choose_dtype(wanted: str, text_config: Any, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        dtype = getattr(torch, wanted)
        assert isinstance(dtype, torch.dtype)
        return dtype
    own = getattr(text_config, "dtype", None) or torch.float32
    dtype = own if isinstance(own, torch.dtype) else getattr(torch, own)
    assert isinstance(dtype, torch.dtype)
    if device.type == "cpu" and dtype.itemsize == 2 and not _has_half_arithmetic():
        # Without such instructions torch multiplies bfloat16 six times slower than float32.
        logger.warning("this CPU has no %s arithmetic: computing in float32", dtype)
        return torch.float32
    return dtype


def _stays_narrow(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the weights stay in bfloat16 while everything is computed in float32."""
    return (
        dtype is torch.float32
        and device.type == "cpu"
        and config.attention != "torch"
        and is_all_bfloat16(Path(config.model_path))
        and load_library()
    )


def _has_half_arithmetic() -> bool:
    is_supported: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())
