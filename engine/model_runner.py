"""Runs a loaded model on one packed row of tokens."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.attention_backend import choose_attention
from engine.batch import Batch
from engine.checkpoint import eos_token_ids, load_config, load_model
from engine.config import EngineConfig
from engine.kv_cache import KVCache, KVCacheSpec
from engine.memory_report import MemoryReport
from engine.model_probe import probe_model
from engine.servable import wanted_windows

logger = logging.getLogger(__name__)

# RoPE whose frequencies depend on the longest position in the call: a neighbour would change
# a request. Up to the original length they are constant.
_NEIGHBOUR_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class ModelRunner:
    """Owns the model. Invariant: a row's logits depend on its own request alone."""

    def __init__(self, config: EngineConfig) -> None:
        self.device = _choose_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model_config = load_config(config)
        text_config = model_config.get_text_config()
        self.max_model_len = _max_model_len(config, text_config)
        self.vocab_size = int(text_config.vocab_size)
        self.rope_variant = json.dumps(
            getattr(text_config, "rope_parameters", None), sort_keys=True, default=str
        )
        self._model = load_model(config, model_config, self.device)
        self.eos_token_ids = eos_token_ids(self._model)
        self.spec = probe_model(
            self._model,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            wanted_windows=wanted_windows(text_config, self.max_model_len),
        )
        self.plan_attention = choose_attention(config.attention, self.device)
        logger.info("loaded %s on %s: %s", config.model_path, self.device, self.spec)

    def report_memory(self, kv_cache: KVCache, *, max_model_len: int) -> MemoryReport:
        """Where the memory of this model and its KV goes now."""
        blocks_per_request = -(-max_model_len // kv_cache.spec.block_size)
        buffer_bytes = sum(buffer.nbytes for buffer in self._model.buffers())
        return MemoryReport(
            weights_bytes=sum(parameter.nbytes for parameter in self._model.parameters()),
            kv_bytes=kv_cache.tensor.nbytes,
            buffer_bytes=buffer_bytes + kv_cache.buffer_bytes,
            max_model_len=max_model_len,
            max_concurrency=kv_cache.num_blocks // blocks_per_request,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of the tokens of `batch.sample_index`, [len, vocab]."""
        output = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.sample_index,
            attention_metadata=batch.attention,
        )
        logits = output.logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits


def _choose_device(wanted: str) -> torch.device:
    if wanted != "auto":
        return torch.device(wanted)
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


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
