"""Where an engine's memory goes, counted over its tensors."""

from dataclasses import dataclass

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of one engine, and how many requests its blocks hold at once."""

    weights_bytes: int  # parameters; tied ones once
    kv_bytes: int  # the pool
    # The model's own buffers, blocks outside the pool, room for gathered blocks, captured steps.
    buffer_bytes: int
    max_model_len: int
    max_concurrency: int  # requests of `max_model_len` tokens whose blocks fit together

    def __str__(self) -> str:
        """One line for the log."""
        return (
            f"weights {self.weights_bytes / _MIB:.1f} MiB, KV blocks {self.kv_bytes / _MIB:.1f} "
            f"MiB, run-time buffers {self.buffer_bytes / _MIB:.1f} MiB; maximum concurrency at "
            f"{self.max_model_len} tokens per request: {self.max_concurrency}"
        )
