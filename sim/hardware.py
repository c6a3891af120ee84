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

from sim.devices import DEVICES, Device


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
class Model:
    """What a step does with a model."""

    weight_bytes: float  # read by every step
    token_flops: float  # of one token through all layers
    pair_flops: float  # of attention, for a token and each before it
    kv_bytes_per_token: int
    head_flops: float = 0.0  # of a token whose successor is sampled
    itemsize: int = 2  # of the numbers that are multiplied
    num_gpus: int = 1  # a worker of it has


# Sources: the models' published configurations. Scores of attention, and their sum over the values:
# two multiplications and additions each.
MODELS: Mapping[str, Model] = {
    "llama-8b": Model(
        weight_bytes=2 * 8.03e9,
        token_flops=2 * 8.03e9,
        pair_flops=4.0 * 32 * 4096,
        kv_bytes_per_token=131_072,
    ),
    "llama-70b": Model(
        weight_bytes=2 * 70.6e9,
        token_flops=2 * 70.6e9,
        pair_flops=4.0 * 80 * 8192,
        kv_bytes_per_token=327_680,
        num_gpus=4,
    ),
}
USABLE_MEMORY = 0.9
REQUEST_S = 0.00002


def from_data_sheet(device: Device, model: Model) -> Hardware:
    """Roofline of a model on its GPUs; their number divides all work evenly."""
    device_flops = device.flops if model.itemsize == 2 else device.wide_flops
    flops = device_flops * device.flops_share * model.num_gpus
    bytes_per_s = device.bytes_per_s * device.bytes_share * model.num_gpus
    kv_bytes = device.num_bytes * model.num_gpus * USABLE_MEMORY - model.weight_bytes
    return Hardware(
        fixed_s=device.fixed_s,
        weights_s=model.weight_bytes / bytes_per_s,
        token_s=model.token_flops / flops,
        attention_s=model.pair_flops / flops,
        request_s=REQUEST_S + model.head_flops / flops,
        kv_token_s=model.kv_bytes_per_token / bytes_per_s,
        num_kv_tokens=max(int(kv_bytes / model.kv_bytes_per_token), 1),
        kv_bytes_per_token=model.kv_bytes_per_token,
        link_bytes_per_s=device.link_bytes_per_s * device.link_share * model.num_gpus,
        link_latency_s=device.link_latency_s,
    )


def load_hardware(name: str, *, model: str) -> Hardware:
    """A device by name, or a JSON file of measured values; ValueError names what is wrong."""
    if model not in MODELS:
        raise ValueError(f"Got model {model!r} but expected one of {', '.join(MODELS)}")
    if name in DEVICES:
        return from_data_sheet(DEVICES[name], MODELS[model])
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"Got hardware {name!r} but expected one of {', '.join(DEVICES)} or a JSON file"
        )
    # What a file leaves out is that of an H100 with the model.
    return replace(from_data_sheet(DEVICES["h100"], MODELS[model]), **read_measured(path))


def read_measured(path: Path) -> dict[str, Any]:
    """The values of a JSON file by the names of `Hardware`; ValueError names what is wrong."""
    try:
        values: Any = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object of names and numbers")
    known = {each.name for each in fields(Hardware)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{path}: unknown {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return values
