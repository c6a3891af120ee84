"""How long things take on a simulated worker: from a GPU's data sheet, or as measured.

A step reads the weights once and the KV of its running requests, and computes every token in it;
attention makes a token dearer the more tokens stand before it:

    step = fixed + max(weights_read, tokens x token_s + attention_s x (token, earlier token) pairs)
                 + kv_token_s x KV of the decodes + request_s x decodes
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What one worker and its links can do. A JSON file with these names may set any of them."""

    fixed_s: float  # of every step: launches, scheduling, sampling
    weights_s: float  # reading the weights, which computing many tokens hides
    token_s: float  # computing one token
    attention_s: float  # of one prompt token, for each token before it
    request_s: float  # of one decoding request, besides
    kv_token_s: float  # reading one token's KV
    num_kv_tokens: int  # that fit a worker
    kv_bytes_per_token: int
    link_bytes_per_s: float  # out of a prefill worker or into a decode worker, all links together
    link_latency_s: float  # of one hand-over of a piece, besides its bytes
    rpc_latency_s: float = 0.0005  # of one message between router and worker
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131_072
    restart_s: float = 30.0  # from a worker's death until its successor serves

    def __post_init__(self) -> None:
        """Refuse what no machine can be."""
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int | float) or value < 0:
                raise ValueError(f"Got hardware {each.name} = {value!r} but expected 0 or more")
        for name in ("num_kv_tokens", "max_num_seqs", "max_num_batched_tokens", "link_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"Got hardware {name} = 0 but expected more")

    def step_s(
        self, *, num_decodes: int, num_kv_tokens: int, num_chunk_tokens: int, num_pairs: int
    ) -> float:
        """Seconds of one step; `num_pairs` are the prompt tokens' (token, earlier token) pairs."""
        compute_s = (num_decodes + num_chunk_tokens) * self.token_s + num_pairs * self.attention_s
        return (
            self.fixed_s
            + max(self.weights_s, compute_s)
            + num_kv_tokens * self.kv_token_s
            + num_decodes * self.request_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A data sheet, and which share of it is reached."""

    flops: float  # dense bfloat16
    bytes_per_s: float  # of its memory
    num_bytes: float
    link_bytes_per_s: float  # network, one direction
    flops_share: float = 0.5
    bytes_share: float = 0.7
    link_share: float = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What counts of a dense model in bfloat16."""

    num_parameters: float
    num_layers: int
    hidden_size: int
    kv_bytes_per_token: int
    num_gpus: int  # a worker of it has


# Sources: NVIDIA's data sheets of H100 SXM and H200 SXM; a 400 Gbit/s card for each GPU.
GPUS: Mapping[str, Gpu] = {
    "h100": Gpu(flops=989e12, bytes_per_s=3.35e12, num_bytes=80e9, link_bytes_per_s=50e9),
    "h200": Gpu(flops=989e12, bytes_per_s=4.8e12, num_bytes=141e9, link_bytes_per_s=50e9),
}
# Sources: the models' published configurations.
MODELS: Mapping[str, Model] = {
    "llama-8b": Model(
        num_parameters=8.03e9,
        num_layers=32,
        hidden_size=4096,
        kv_bytes_per_token=131_072,
        num_gpus=1,
    ),
    "llama-70b": Model(
        num_parameters=70.6e9,
        num_layers=80,
        hidden_size=8192,
        kv_bytes_per_token=327_680,
        num_gpus=4,
    ),
}
USABLE_MEMORY = 0.9
FIXED_S = 0.002


def from_data_sheet(gpu: Gpu, model: Model) -> Hardware:
    """Roofline of a model on its GPUs; their number divides all work evenly."""
    flops = gpu.flops * gpu.flops_share * model.num_gpus
    bytes_per_s = gpu.bytes_per_s * gpu.bytes_share * model.num_gpus
    weight_bytes = 2.0 * model.num_parameters
    kv_bytes = gpu.num_bytes * model.num_gpus * USABLE_MEMORY - weight_bytes
    return Hardware(
        fixed_s=FIXED_S,
        weights_s=weight_bytes / bytes_per_s,
        token_s=2.0 * model.num_parameters / flops,
        # Scores and their sum over the values: two multiplications and additions each.
        attention_s=4.0 * model.num_layers * model.hidden_size / flops,
        request_s=0.00002,
        kv_token_s=model.kv_bytes_per_token / bytes_per_s,
        num_kv_tokens=int(kv_bytes / model.kv_bytes_per_token),
        kv_bytes_per_token=model.kv_bytes_per_token,
        link_bytes_per_s=gpu.link_bytes_per_s * gpu.link_share * model.num_gpus,
        link_latency_s=0.001,
    )


def load_hardware(name: str, *, model: str) -> Hardware:
    """A GPU by name, or a JSON file of measured values; ValueError names what is wrong."""
    if model not in MODELS:
        raise ValueError(f"Got model {model!r} but expected one of {', '.join(MODELS)}")
    if name in GPUS:
        return from_data_sheet(GPUS[name], MODELS[model])
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"Got hardware {name!r} but expected one of {', '.join(GPUS)} or a JSON file"
        )
    values: Any = orjson.loads(path.read_bytes())
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object of names and numbers")
    known = {each.name for each in fields(Hardware)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{path}: unknown {unknown[0]!r}; known are {', '.join(sorted(known))}")
    # What a file leaves out is that of an H100 with the model.
    return replace(from_data_sheet(GPUS["h100"], MODELS[model]), **values)
