"""What a person sets for one engine; what is computed from model and machine is not here."""

from dataclasses import dataclass

ATTENTIONS = frozenset({"auto", "native", "paged", "torch"})
DTYPES = frozenset({"auto", "float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine."""

    model_path: str  # local checkpoint directory or hub id
    model_id: str = ""  # name in block hashes and layouts; empty = model_path
    model_revision: str = ""
    dtype: str = "auto"  # auto = the checkpoint's; float32 where a CPU cannot compute in that
    max_model_len: int | None = None  # None = what the model allows
    block_size: int = 32  # tokens per KV block
    num_kv_blocks: int | None = None  # None = computed from the memory there is
    max_num_seqs: int = 16  # requests in one step
    max_num_batched_tokens: int = 512  # tokens in one step
    num_threads: int | None = None  # None = leave torch's own choice
    pin_threads: bool = True  # on a CPU each keeps to a core of its own, where there are enough
    device: str = "auto"  # auto = cuda where there is one, else cpu
    # auto = native on a CPU where it was built, paged on a GPU where a kernel is right; else torch
    attention: str = "auto"
    cuda_graphs: bool = True  # decode steps are captured once and replayed, where that can be
    run_ahead: bool = True  # a step is launched while the one before it runs, where that can be

    def __post_init__(self) -> None:
        """Refuse values no engine can run with."""
        if not self.model_path:
            raise ValueError(f"Got {self.model_path = } but expected a directory or a hub id")
        if self.dtype not in DTYPES:
            raise ValueError(f"Got {self.dtype = } but expected one of {sorted(DTYPES)}")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"Got {self.attention = } but expected one of {sorted(ATTENTIONS)}")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"Got {name} = {getattr(self, name)} but expected at least 1")
        for name in ("max_model_len", "num_kv_blocks", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Got {name} = {value} but expected at least 1 or nothing")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"Got {self.max_num_batched_tokens = } but expected at least {self.max_num_seqs = }"
            )
