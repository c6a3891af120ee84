"""SmolLM2 from a GGUF file: what transformers reads of it, and what GGUF has no field for."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

MODEL_MAX_LENGTH = 8192


def convert(gguf: Path, directory: Path) -> None:
    """Write the checkpoint into an existing directory."""
    transformers_logging.disable_progress_bar()
    _load_model(gguf).save_pretrained(directory)
    _load_tokenizer(gguf).save_pretrained(directory)


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
