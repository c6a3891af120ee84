"""How many KV blocks an engine takes: what its requests can use, as far as the memory goes."""

import os
from pathlib import Path

from engine.config import EngineConfig

CUDA_SHARE = 0.85  # of what is free once the weights are loaded; steps need the rest
CPU_SHARE = 0.1  # of all memory: several engines share a machine, and weights need room too


def choose_num_blocks(
    config: EngineConfig, *, max_model_len: int, bytes_per_block: int, kv_memory_bytes: float
) -> int:
    """Blocks of the KV pool: what was asked for, or what is useful and fits the memory."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    num_blocks = min(useful, int(kv_memory_bytes // bytes_per_block))
    if num_blocks < 1:
        raise ValueError(f"Got no memory for one KV block of {bytes_per_block} bytes")
    return num_blocks


def machine_memory_bytes() -> int:
    """Memory of this machine, or of the container that this process runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total
