"""What an engine computes in, and what its weights and its KV are stored in."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.native.library import load_library
from engine.widening import is_all_bfloat16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Precision:
    """One engine's.

    Where weights stay narrow, whatever stands between two products is float32: only keys, values
    and inputs of products are rounded to `dtype`.
    """

    dtype: torch.dtype  # of keys, values and products
    is_narrow: bool  # weights can stay the file's own pages of bfloat16


def choose_precision(config: EngineConfig, text_config: Any, device: torch.device) -> Precision:
    """As the configuration wants it, the checkpoint has it and the device can do it."""
    dtype = _choose_dtype(config.dtype, text_config, device)
    return Precision(dtype, _stays_narrow(config, dtype, device))


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
    """Whether bfloat16 weights stay as they are while the rest is float32."""
    return (
        dtype in {torch.float32, torch.bfloat16}
        and device.type == "cpu"
        and config.attention != "torch"
        and is_all_bfloat16(Path(config.model_path))
        and load_library()
    )


def _has_half_arithmetic() -> bool:
    is_supported: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())
