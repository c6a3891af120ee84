"""Loads a transformers model as it is and runs it on one packed row of tokens."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import ATTENTION_NAME, AttentionProbe, register_attention
from engine.batch import Batch
from engine.config import EngineConfig
from engine.kv_cache import KVCacheSpec

logger = logging.getLogger(__name__)

# Kinds of layers whose mask `paged_attention` can make.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
# RoPE whose frequencies depend on the longest position in the call: a neighbour would change
# a request. Up to the original length they are constant.
_NEIGHBOUR_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class ModelRunner:
    """Owns the model. Invariant: a row's logits depend on its own request alone."""

    def __init__(self, config: EngineConfig) -> None:
        self.device = _choose_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        register_attention()
        origin: dict[str, Any] = {"trust_remote_code": False}
        if config.model_revision and not Path(config.model_path).is_dir():
            origin["revision"] = config.model_revision
        model_config = _load(AutoConfig, config, **origin)
        text_config = model_config.get_text_config()
        _refuse_unservable(model_config, text_config)
        self.max_model_len = _max_model_len(config, text_config)
        self.vocab_size = int(text_config.vocab_size)
        self.rope_variant = json.dumps(
            getattr(text_config, "rope_parameters", None), sort_keys=True, default=str
        )
        self._model = _load(
            AutoModelForCausalLM,
            config,
            dtype=_choose_dtype(config.dtype, text_config, self.device),
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            **origin,
        )
        self._model.to(self.device).eval().requires_grad_(False)
        self.eos_token_ids = _eos_token_ids(self._model)
        self.spec = self._probe(text_config, config.block_size)
        logger.info("loaded %s on %s: %s", config.model_path, self.device, self.spec)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of the tokens of `batch.sample_index`, [len, vocab]."""
        output = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.sample_index,
            attention_metadata=batch.attention_metadata,
        )
        logits = output.logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits

    def _probe(self, text_config: Any, block_size: int) -> KVCacheSpec:
        """Run two tokens and see what the layers ask of the cache; ValueError if we lack it."""
        probe = AttentionProbe()
        kind = text_config.model_type
        try:
            with torch.inference_mode():
                self._model(
                    input_ids=torch.zeros(1, 2, dtype=torch.long, device=self.device),
                    position_ids=torch.arange(2, device=self.device)[None],
                    use_cache=False,
                    logits_to_keep=torch.tensor([1], device=self.device),
                    attention_metadata=probe,
                )
        except (TypeError, AttributeError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"Got a {kind!r} model but expected one whose attention can be replaced: {error}"
            ) from error
        if probe.extras:
            raise ValueError(f"Got a {kind!r} model with {sorted(probe.extras)}: not supported")
        if (wanted := _wanted_windows(text_config)) and wanted != {
            layer: window is not None for layer, window in probe.windows.items()
        }:
            raise ValueError(f"Got a {kind!r} model whose layers do not tell their sliding window")
        num_layers = int(text_config.num_hidden_layers)
        if sorted(probe.layers) != list(range(num_layers)) or len(set(probe.shapes)) != 1:
            raise ValueError(
                f"Got a {kind!r} model but expected {num_layers} layers of full or sliding "
                f"attention with keys and values of one shape, each with a cache of its own"
            )
        num_kv_heads, head_dim, dtype = probe.shapes[0]
        return KVCacheSpec(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=str(dtype).removeprefix("torch."),
            device=str(self.device),
        )


def _load(loader: Any, config: EngineConfig, **arguments: Any) -> Any:
    try:
        return loader.from_pretrained(config.model_path, **arguments)
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            f"Got {config.model_path = } but expected a safetensors checkpoint of a model whose "
            f"attention can be replaced: {str(error).splitlines()[0]}"
        ) from error


def _choose_device(wanted: str) -> torch.device:
    if wanted != "auto":
        return torch.device(wanted)
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


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


def _has_half_arithmetic() -> bool:
    is_supported: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())


def _refuse_unservable(model_config: Any, text_config: Any) -> None:
    kind = model_config.model_type
    if getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(f"Got a {kind!r} model but expected a decoder: it has an encoder")
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if unknown := layer_types - _KNOWN_LAYERS:
        raise ValueError(
            f"Got a {kind!r} model with {sorted(unknown)} layers but expected full or sliding "
            f"attention only"
        )
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise ValueError(f"Got a {kind!r} model but expected layers that share no KV")


def _wanted_windows(text_config: Any) -> dict[int, bool]:
    """Which layers must see a window, by the config; empty when it does not say."""
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types:
        return {n: kind == "sliding_attention" for n, kind in enumerate(layer_types)}
    if getattr(text_config, "sliding_window", None):
        return dict.fromkeys(range(int(text_config.num_hidden_layers)), True)
    return {}


def _rope_parts(text_config: Any) -> list[Mapping[str, Any]]:
    """RoPE parameters; some models have one set per type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [part for part in parameters.values() if isinstance(part, Mapping)]


def _max_model_len(config: EngineConfig, text_config: Any) -> int:
    limit = int(getattr(text_config, "max_position_embeddings", None) or 1 << 20)
    reason = "max_position_embeddings"
    for part in _rope_parts(text_config):
        if part.get("rope_type") in _NEIGHBOUR_DEPENDENT_ROPE:
            original = part.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", None
            )
            limit = min(limit, int(original or limit))
            reason = f"original length of its {part['rope_type']} RoPE"
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"Got {config.max_model_len = } but expected at most {limit}: the {reason}"
        )
    return config.max_model_len or limit


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Every id that ends a text, as the checkpoint's generation settings say."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(sorted(set(ids)))


def choose_num_blocks(config: EngineConfig, spec: KVCacheSpec, max_model_len: int) -> int:
    """Blocks of the KV pool: what was asked for, or what is useful and fits the memory."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    useful = config.max_num_seqs * -(-max_model_len // spec.block_size)
    fitting = int(_kv_memory_bytes(spec.device) // spec.bytes_per_block)
    num_blocks = min(useful, fitting)
    if num_blocks < 1:
        raise ValueError(f"Got no memory for one KV block of {spec.bytes_per_block} bytes")
    return num_blocks


def _kv_memory_bytes(device: str) -> float:
    if device.startswith("cuda"):
        return 0.85 * torch.cuda.mem_get_info(torch.device(device))[0]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    # Several engines share a machine, and weights need room too.
    return 0.1 * total
