"""GPUs, where there are any: torch sees them, NCCL is there, they reach each other."""

import importlib
import resource
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

from cluster.finding import Finding, ok, problem, warning

DEVICES = Path("/dev")
_GIB = 1024**3


def examine(*, wants_gpu: bool) -> Iterator[Finding]:
    """Torch is asked only where the driver shows a device: importing it takes seconds."""
    if not any(DEVICES.glob("nvidia[0-9]*")):
        text = "none on this machine"
        if wants_gpu:
            yield warning("gpu", text, "num_gpus needs nodes with GPUs in the Ray cluster joined")
        else:
            yield ok("gpu", f"{text}: workers run on its CPU")
        return
    yield from check_gpus(importlib.import_module("torch"))
    yield check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def check_gpus(torch: Any) -> Iterator[Finding]:
    """What torch says of them."""
    if torch.version.cuda is None:
        yield problem("gpu", f"torch {torch.__version__} has no CUDA", "make setup TORCH=cuda")
        return
    if not torch.cuda.is_available():
        advice = "nvidia-smi must work for this user; the driver must be new enough"
        yield problem("gpu", f"torch (CUDA {torch.version.cuda}) cannot use the driver", advice)
        return
    count = torch.cuda.device_count()
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{facts.name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
        if free < 0.9 * total:
            yield warning(f"gpu {index}", text, "nvidia-smi shows who has the rest")
        else:
            yield ok(f"gpu {index}", text)
    if not torch.distributed.is_nccl_available():
        yield problem("nccl", "torch was built without it", "make setup TORCH=cuda")
        return
    yield ok("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    if count > 1:
        yield check_peers(torch, count)


def check_peers(torch: Any, count: int) -> Finding:
    """Whether KV can go from one to another without the host."""
    apart = [
        f"{one}→{other}"
        for one, other in permutations(range(count), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        advice = "hand-overs between them pass the host: nvidia-smi topo -m shows the wires"
        return warning("peer access", f"none {', '.join(apart)}", advice)
    return ok("peer access", f"all {count} GPUs reach each other")


def check_locked_memory(limit: int) -> Finding:
    """RDMA pins memory."""
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    advice = "ulimit -l unlimited: RDMA links pin memory; TCP ones do without"
    return warning("locked memory", f"at most {limit / 1024**2:.0f} MiB", advice)
