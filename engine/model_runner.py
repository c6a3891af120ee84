"""Runs a loaded model on one packed row of tokens."""

import json
import logging
from dataclasses import replace

import torch

from engine.attention_backend import choose_attention, is_compiled
from engine.batch import Batch
from engine.checkpoint import eos_token_ids, load_config, load_model
from engine.config import EngineConfig
from engine.context_limit import choose_max_model_len
from engine.fused.fuse import fuse_model, fuse_modules
from engine.fused.model import FusedModel
from engine.kv_cache import KVCache
from engine.memory_report import MemoryReport
from engine.model_probe import ModelTraits, probe_model
from engine.paged.accelerator import accelerator_of
from engine.paged.inputs import PagedInputs
from engine.paged.proof import find_kernel
from engine.pool_size import CPU_SHARE, CUDA_SHARE, choose_num_blocks, machine_memory_bytes
from engine.precision import choose_precision
from engine.servable import wanted_windows
from engine.widening import is_narrow, round_inputs

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the model. Invariant: a row's logits depend on its own request alone."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = _choose_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model_config = load_config(config)
        text_config = model_config.get_text_config()
        self.max_model_len = choose_max_model_len(config, text_config)
        self.vocab_size = int(text_config.vocab_size)
        self.rope_variant = json.dumps(
            getattr(text_config, "rope_parameters", None), sort_keys=True, default=str
        )
        precision = choose_precision(config, text_config, self.device)
        self._model = load_model(config, precision, self.device)
        self.eos_token_ids = eos_token_ids(self._model)
        traits = probe_model(
            self._model,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            wanted_windows=wanted_windows(text_config, self.max_model_len),
        )
        self.spec = traits.spec
        self.paged = self._choose_paged(config, traits, int(text_config.num_attention_heads))
        self._mask = torch.empty(1, 1, 0, 0, device=self.device)
        if self.paged is None:
            self.plan_attention = choose_attention(config.attention, self.device)
        else:
            self.plan_attention = self.paged.plan
        self._fused: FusedModel | None = None
        if is_compiled(config.attention, self.device):
            num_fused = fuse_modules(self._model, self.spec)
            self._fused = fuse_model(self._model, self.spec)
            logger.info("%d modules of %s are fused", num_fused, config.model_path)
        if precision.dtype is torch.bfloat16 and is_narrow(self._model):
            round_inputs(self._model)
            self.spec = replace(self.spec, dtype="bfloat16")
        logger.info("loaded %s on %s: %s", config.model_path, self.device, self.spec)

    def _choose_paged(
        self, config: EngineConfig, traits: ModelTraits, num_heads: int
    ) -> PagedInputs | None:
        """The way over a kernel for blocks, where there is one that this model can use."""
        wants = config.attention == "paged" or (
            config.attention == "auto" and self.device.type == "cuda"
        )
        if not wants or not traits.is_plain:
            return None
        kernel = find_kernel(traits.spec, num_heads=num_heads, windows=traits.windows)
        if kernel is None:
            logger.warning(
                "no kernel here reads blocks of %d tokens: they are gathered, which is slower",
                config.block_size,
            )
            return None
        return PagedInputs(
            kernel,
            accelerator_of(self.device),
            device=self.device,
            max_num_seqs=config.max_num_seqs,
        )

    def choose_num_blocks(self, config: EngineConfig) -> int:
        """Blocks of a KV pool beside this model."""
        if self.device.type == "cuda":
            kv_memory_bytes = CUDA_SHARE * torch.cuda.mem_get_info(self.device)[0]
        else:
            kv_memory_bytes = CPU_SHARE * machine_memory_bytes()
        return choose_num_blocks(
            config,
            max_model_len=self.max_model_len,
            bytes_per_block=self.spec.bytes_per_block,
            kv_memory_bytes=kv_memory_bytes,
        )

    def report_memory(
        self, kv_cache: KVCache, *, max_model_len: int, graph_bytes: int
    ) -> MemoryReport:
        """Where the memory of this model and its KV goes now."""
        blocks_per_request = -(-max_model_len // kv_cache.spec.block_size)
        buffer_bytes = sum(buffer.nbytes for buffer in self._model.buffers())
        return MemoryReport(
            weights_bytes=sum(parameter.nbytes for parameter in self._model.parameters()),
            kv_bytes=kv_cache.tensor.nbytes,
            buffer_bytes=buffer_bytes + kv_cache.buffer_bytes + graph_bytes,
            max_model_len=max_model_len,
            max_concurrency=kv_cache.num_blocks // blocks_per_request,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of the tokens of `batch.sample_index`, [len, vocab]."""
        if self._fused is not None:
            return self._fused.logits(batch)
        output = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            # Without any, transformers looks for padding and packed rows, which takes time and, on
            # a device, a wait.
            attention_mask=self._mask,
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
