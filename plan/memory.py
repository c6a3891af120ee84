"""Where an engine's memory will go: the numbers of its own report, before anything is loaded."""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.context_limit import choose_max_model_len
from engine.pool_size import CPU_SHARE, CUDA_SHARE, choose_num_blocks
from plan.attention import gathers_short_prompts, key_value_dims, num_kv_heads
from plan.model_config import ModelConfig
from plan.parameters import Parameters
from sim.devices import Device

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
CUDA_CONTEXT_BYTES = 0.6e9  # kernels and libraries
_WARM_UP_TOKENS = 128
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one engine."""

    dtype: str  # of keys, values and products
    weights_bytes: int
    is_narrow: bool  # bfloat16 weights, and float32 between products
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int  # as the pool allows
    buffer_bytes: int  # as the engine reports it once warm
    step_bytes: int  # at most, while a step runs: activations, logits, gathered blocks
    spare_bytes: float  # what the device has left for that

    @property
    def kv_bytes(self) -> int:
        """The whole pool."""
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    def num_fitting(self, context_len: int) -> int:
        """Requests of so many tokens whose blocks fit together."""
        return self.num_blocks // -(-context_len // self.block_size)

    def max_concurrency(self, context_len: int) -> int:
        """Requests of so many tokens that run at once."""
        return min(self.num_fitting(context_len), self.max_num_seqs)


def plan_memory(
    config: ModelConfig, parameters: Parameters, engine: EngineConfig, device: Device
) -> MemoryPlan:
    """As the engine decides it; ValueError where the model does not fit."""
    dtype = _choose_dtype(engine.dtype, config, device)
    is_narrow = _stays_narrow(dtype, config, engine, device)
    weights_bytes = _weights_bytes(config, parameters, dtype, is_narrow=is_narrow)
    kv_bytes_per_token = _kv_bytes_per_token(config, ITEMSIZES[dtype])
    max_model_len = choose_max_model_len(engine, config)
    kv_memory_bytes = _kv_memory_bytes(weights_bytes, device)
    num_blocks = choose_num_blocks(
        engine,
        max_model_len=max_model_len,
        bytes_per_block=kv_bytes_per_token * engine.block_size,
        kv_memory_bytes=kv_memory_bytes,
    )
    max_model_len = min(max_model_len, num_blocks * engine.block_size)
    kv_bytes = num_blocks * engine.block_size * kv_bytes_per_token
    gathers = not (device.has_compiled_attention and engine.attention != "torch")
    slab_bytes = kv_bytes_per_token * engine.block_size // (2 * config.number("num_hidden_layers"))
    buffer_bytes = kv_bytes_per_token * engine.block_size  # the padding block
    if gathers:
        buffer_bytes += slab_bytes * _gathered_slabs(config, engine, max_model_len)
    return MemoryPlan(
        dtype=dtype,
        weights_bytes=weights_bytes,
        is_narrow=is_narrow,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=engine.block_size,
        num_blocks=num_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=max_model_len,
        buffer_bytes=buffer_bytes,
        step_bytes=_step_bytes(config, engine, 4 if is_narrow else ITEMSIZES[dtype])
        + gathers * slab_bytes * _most_slabs(engine, max_model_len),
        spare_bytes=device.num_bytes - _context_bytes(device) - weights_bytes - kv_bytes,
    )


def _choose_dtype(wanted: str, config: ModelConfig, device: Device) -> str:
    if wanted != "auto":
        return wanted
    own = str(config.get("dtype", "float32")).removeprefix("torch.")
    if own not in ITEMSIZES:
        raise ValueError(f"{config.source}: got dtype {own!r} but expected {', '.join(ITEMSIZES)}")
    is_slow = device.kind == "cpu" and ITEMSIZES[own] == 2 and not device.has_half_arithmetic
    return "float32" if is_slow else own


def _stays_narrow(dtype: str, config: ModelConfig, engine: EngineConfig, device: Device) -> bool:
    family = config.family
    is_mostly_linear = family.has_linear_layers and not family.has_experts
    return (
        (dtype == "float32" or (dtype == "bfloat16" and is_mostly_linear))
        and device.kind == "cpu"
        and device.has_compiled_attention
        and engine.attention != "torch"
        and config.get("dtype") == "bfloat16"
    )


def _weights_bytes(
    config: ModelConfig, parameters: Parameters, dtype: str, *, is_narrow: bool
) -> int:
    if not is_narrow:
        return parameters.total * ITEMSIZES[dtype]
    narrow = parameters.table + parameters.head
    narrow += parameters.matrices * config.family.has_linear_layers
    return 2 * narrow + 4 * (parameters.total - narrow)


def _kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Keys and values of all layers; a window hides tokens and frees none of them."""
    width = max(key_value_dims(config))  # a narrower one is filled up
    return 2 * config.number("num_hidden_layers") * num_kv_heads(config) * width * itemsize


def _context_bytes(device: Device) -> float:
    return CUDA_CONTEXT_BYTES if device.kind == "cuda" else 0.0


def _kv_memory_bytes(weights_bytes: int, device: Device) -> float:
    free = device.num_bytes - _context_bytes(device) - weights_bytes
    if free <= 0:
        raise ValueError(
            f"weights of {weights_bytes / _GB:.1f} GB do not fit the "
            f"{device.num_bytes / _GB:.1f} GB of one device, and a worker has one: "
            f"a narrower model.dtype or a larger device is needed"
        )
    return CUDA_SHARE * free if device.kind == "cuda" else CPU_SHARE * device.num_bytes


def _gathered_slabs(config: ModelConfig, engine: EngineConfig, max_model_len: int) -> int:
    """Room for gathered blocks that the engine's warm-up leaves: twice what was too much first."""
    num_tokens = min(_WARM_UP_TOKENS, engine.max_num_batched_tokens, max_model_len // 2)
    first_len = num_tokens if gathers_short_prompts(config, num_tokens) else num_tokens + 1
    one_request = 2 * -(-first_len // engine.block_size)
    all_requests = 2 * engine.max_num_seqs * -(-2 // engine.block_size)
    room = 2 * one_request
    return room if all_requests <= room else 2 * all_requests


def _most_slabs(engine: EngineConfig, max_model_len: int) -> int:
    """Every decoding request is gathered as long as the longest; and room grows by doubling."""
    return 2 * 2 * engine.max_num_seqs * -(-max_model_len // engine.block_size)


def _step_bytes(config: ModelConfig, engine: EngineConfig, itemsize: int) -> int:
    """Activations of the widest layer, and float32 logits while they are sampled from."""
    hidden = config.number("hidden_size")
    mlp_width = int(config.get(config.family.mlp_width, 4 * hidden))
    heads = config.number("num_attention_heads") * max(key_value_dims(config))
    per_token = itemsize * (4 * hidden + 3 * mlp_width + 4 * heads)
    logits = engine.max_num_seqs * config.number("vocab_size") * (itemsize + 3 * 4)
    return engine.max_num_batched_tokens * per_token + logits
