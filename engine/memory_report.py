"""Where an engine's memory goes, counted over its tensors."""

from dataclasses import dataclass
from typing import Any

from engine.kv_cache import KVCache

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of one engine, and how many requests its blocks hold at once."""

    weights_bytes: int  # parameters; tied ones once
    kv_bytes: int  # the pool
    buffer_bytes: int  # the model's own buffers, padding block, room for gathered blocks
    max_model_len: int
    max_concurrency: int  # requests of `max_model_len` tokens whose blocks fit together

    def __str__(self) -> str:
        """One line for the log."""
        return (
            f"weights {self.weights_bytes / _MIB:.1f} MiB, KV blocks {self.kv_bytes / _MIB:.1f} "
            f"MiB, run-time buffers {self.buffer_bytes / _MIB:.1f} MiB; maximum concurrency at "
            f"{self.max_model_len} tokens per request: {self.max_concurrency}"
        )


def report_memory(model: Any, kv_cache: KVCache, *, max_model_len: int) -> MemoryReport:
    """Count what a model and its KV cache hold now."""
    blocks_per_request = -(-max_model_len // kv_cache.spec.block_size)
    return MemoryReport(
        weights_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        kv_bytes=kv_cache.tensor.nbytes,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()) + kv_cache.buffer_bytes,
        max_model_len=max_model_len,
        max_concurrency=kv_cache.num_blocks // blocks_per_request,
    )
