"""How fast a worker will be: the simulator's step times, for a model's own numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.config import EngineConfig
from plan.attention import key_value_dims, layer_windows
from plan.memory import ITEMSIZES, MemoryPlan
from plan.model_config import ModelConfig
from plan.parameters import Parameters
from sim.devices import Device
from sim.hardware import Hardware, Model, from_data_sheet

# What can be measured of a model on a machine; the rest of such a file is how it was measured.
COSTS = frozenset(
    {
        *("fixed_s", "weights_s", "token_s", "attention_s", "request_s", "kv_token_s"),
        *("link_bytes_per_s", "link_latency_s"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Step times of one worker."""

    hardware: Hardware
    expert_weights_s: float  # reading all experts
    expert_share: float  # of the experts that one token passes
    windows: tuple[int | None, ...]  # of each layer: earlier tokens it reads; None = all

    def prefill_s(self, num_tokens: int) -> float:
        """One prompt, computed alone in the largest chunks."""
        chunk = self.hardware.max_num_batched_tokens
        starts = range(0, num_tokens, chunk)
        return sum(self._chunk_s(start, min(chunk, num_tokens - start)) for start in starts)

    def decode_step_s(self, num_seqs: int, context_len: int) -> float:
        """One token for each of so many requests of so many tokens."""
        num_kv_tokens = num_seqs * self._num_seen(context_len)
        return self._step_s(num_seqs, num_decodes=num_seqs, num_kv_tokens=num_kv_tokens)

    def mixed_step_s(self, num_seqs: int, context_len: int) -> float:
        """The same beside a chunk of a prompt that fills the step: what aggregated streams see."""
        num_chunk = max(self.hardware.max_num_batched_tokens - num_seqs, 1)
        return self._step_s(
            num_seqs + num_chunk,
            num_decodes=num_seqs,
            num_kv_tokens=num_seqs * self._num_seen(context_len),
            num_chunk_tokens=num_chunk,
            num_pairs=self._num_pairs(0, num_chunk),
        )

    def link_s(self, num_tokens: int) -> float:
        """Handing over so many tokens on an idle link."""
        num_bytes = num_tokens * self.hardware.kv_bytes_per_token
        return self.hardware.link_latency_s + num_bytes / self.hardware.link_bytes_per_s

    def _chunk_s(self, start: int, num_tokens: int) -> float:
        num_pairs = self._num_pairs(start, num_tokens)
        return self._step_s(num_tokens, num_chunk_tokens=num_tokens, num_pairs=num_pairs)

    def _step_s(self, num_tokens: int, **parts: int) -> float:
        """Of the experts only those are read that some token passes."""
        unread = (1.0 - self.expert_share) ** num_tokens
        weights_s = self.hardware.weights_s - self.expert_weights_s * unread
        none = {"num_decodes": 0, "num_kv_tokens": 0, "num_chunk_tokens": 0, "num_pairs": 0}
        return replace(self.hardware, weights_s=weights_s).step_s(**{**none, **parts})

    def _num_seen(self, context_len: int) -> int:
        """Tokens whose KV a decode reads, as a mean over the layers."""
        seen = [min(context_len, window or context_len) for window in self.windows]
        return sum(seen) // len(seen)

    def _num_pairs(self, start: int, num_tokens: int) -> int:
        """(token, token before it) pairs, as a mean over the layers."""
        pairs = [_pairs(start + num_tokens, each) - _pairs(start, each) for each in self.windows]
        return sum(pairs) // len(pairs)


def plan_speed(
    config: ModelConfig,
    parameters: Parameters,
    engine: EngineConfig,
    device: Device,
    memory: MemoryPlan,
    *,
    measured: Mapping[str, Any],
) -> Speed:
    """From the data sheet; `measured` values take the place of computed ones."""
    itemsize = ITEMSIZES[memory.dtype]
    # A table that is no head is not read: a row of it is.
    read_bytes = memory.weights_bytes - (itemsize * parameters.table if parameters.head else 0)
    key_dim, value_dim = key_value_dims(config)
    num_heads = config.number("num_attention_heads")
    layers = config.number("num_hidden_layers")
    model = Model(
        weight_bytes=read_bytes,
        token_flops=2.0 * parameters.active,
        pair_flops=2.0 * layers * num_heads * (key_dim + value_dim),
        kv_bytes_per_token=memory.kv_bytes_per_token,
        head_flops=2.0 * (parameters.head or parameters.table),
        itemsize=itemsize,
    )
    hardware = replace(
        from_data_sheet(device, model),
        num_kv_tokens=memory.num_blocks * memory.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=memory.max_model_len,
    )
    expert_weights_s = parameters.experts * itemsize / (device.bytes_per_s * device.bytes_share)
    return Speed(
        hardware=replace(hardware, **{name: measured[name] for name in COSTS & set(measured)}),
        expert_weights_s=0.0 if "weights_s" in measured else expert_weights_s,
        expert_share=_expert_share(config),
        windows=layer_windows(config) if device.has_compiled_attention else (None,) * layers,
    )


def _expert_share(config: ModelConfig) -> float:
    if not config.family.has_experts:
        return 0.0
    return min(config.number("num_experts_per_tok") / config.number("num_experts"), 1.0)


def _pairs(num_tokens: int, window: int | None) -> int:
    """Of the first so many tokens with themselves and those before."""
    if window is None or num_tokens <= window:
        return num_tokens * (num_tokens + 1) // 2
    return window * (window + 1) // 2 + (num_tokens - window) * window
