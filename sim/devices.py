"""What machines can do, from their data sheets: by name, or from a YAML file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from engine.native.library_file import cpu_flags, find_library
from engine.pool_size import machine_memory_bytes

CPU = "cpu"  # this machine's


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one worker computes on, and which share of its data sheet is reached."""

    kind: str = "cuda"  # or cpu
    flops: float  # dense products of 16-bit numbers
    wide_flops: float  # of float32
    bytes_per_s: float  # of its memory
    num_bytes: float
    link_bytes_per_s: float  # network, one direction
    link_latency_s: float = 0.001
    fixed_s: float = 0.002  # of every step: launches, scheduling, sampling
    flops_share: float = 0.5
    bytes_share: float = 0.7
    link_share: float = 0.8
    has_half_arithmetic: bool = True  # for 16-bit numbers
    has_compiled_attention: bool = False  # ours, for CPUs

    def __post_init__(self) -> None:
        """Refuse what no machine can be."""
        if self.kind not in {"cuda", "cpu"}:
            raise ValueError(f"Got device kind = {self.kind!r} but expected cuda or cpu")
        for each in fields(self):
            if each.type is float and not getattr(self, each.name) > 0:
                value = getattr(self, each.name)
                raise ValueError(f"Got device {each.name} = {value!r} but expected more than 0")


# Sources: NVIDIA's data sheets of the SXM boards; memory as their driver shows it; a network card
# of 400 Gbit/s (A100: 200) for each GPU.
DEVICES: Mapping[str, Device] = {
    "a100": Device(
        flops=312e12,
        wide_flops=19.5e12,
        bytes_per_s=2.04e12,
        num_bytes=85.0e9,
        link_bytes_per_s=25e9,
    ),
    "h100": Device(
        flops=989e12,
        wide_flops=67e12,
        bytes_per_s=3.35e12,
        num_bytes=85.0e9,
        link_bytes_per_s=50e9,
    ),
    "h200": Device(
        flops=989e12,
        wide_flops=67e12,
        bytes_per_s=4.8e12,
        num_bytes=150.1e9,
        link_bytes_per_s=50e9,
    ),
}

# Of one core: two fused products of eight (sixteen) float32 numbers per cycle at 2.5 GHz.
_CORE_FLOPS = 80e9
_CORE_BYTES_PER_S = 10e9
_SOCKET_BYTES_PER_S = 200e9


def this_cpu(num_cores: int | None = None) -> Device:
    """One worker on so many cores of this machine; all it may use unless said."""
    num_cores = num_cores or len(os.sched_getaffinity(0))
    flags = set(cpu_flags().partition(":")[2].split())
    has_wide_vectors = {"avx512bw", "avx512vl", "avx512dq"} <= flags
    has_half_arithmetic = has_wide_vectors or "bf16" in flags
    flops = _CORE_FLOPS * num_cores * (2 if has_wide_vectors else 1)
    return Device(
        kind=CPU,
        flops=flops * (2 if {"avx512_bf16", "bf16"} & flags else 1),
        wide_flops=flops,
        bytes_per_s=min(_CORE_BYTES_PER_S * num_cores, _SOCKET_BYTES_PER_S),
        num_bytes=machine_memory_bytes(),
        link_bytes_per_s=2e9,  # a copy through shared memory
        fixed_s=0.010,
        has_half_arithmetic=has_half_arithmetic,
        has_compiled_attention=find_library() is not None,
    )


def load_device(name: str, *, num_cores: int | None = None) -> Device:
    """A device by name, or of a YAML file; ValueError names what is wrong."""
    if name == CPU:
        return this_cpu(num_cores)
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"Got hardware {name!r} but expected one of {', '.join([*DEVICES, CPU])} or a YAML file"
        )
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected keys and values")
    base = load_device(str(values.pop("base", "h100")), num_cores=num_cores)
    known = {each.name: each.type for each in fields(Device)}
    if unknown := sorted(map(str, set(values) - set(known))):
        names = ", ".join(["base", *known])
        raise ValueError(f"{path}: unknown {unknown[0]!r}; known are {names}")
    return replace(base, **{key: _typed(key, values[key], known[key]) for key in values})


def _typed(name: str, value: Any, kind: Any) -> Any:
    """YAML takes 80e9 for a text."""
    try:
        return float(value) if kind is float else kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"Got device {name} = {value!r} but expected a number") from None
