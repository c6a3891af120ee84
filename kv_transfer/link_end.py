"""What a worker says of itself so that both ends can agree on how their link is made."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from kv_transfer.config import KVTransferConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """One end of a link, in plain values; the fields of the message of the same name."""

    # kv_transfer.backend as it was set there
    backend: str = "auto"
    # where the pool lies: "cpu", or "cuda:" and the UUID of the device
    device: str = "cpu"
    # kernel, network namespace and user of the process; empty where the system does not say
    boot_id: str = ""
    network_namespace: str = ""
    user_id: int = 0
    # network interface the links bind to; empty: the loopback address
    interface: str = ""
    # why this end cannot use shared memory; empty when it can
    no_shared_memory: str = ""

    @property
    def is_on_gpu(self) -> bool:
        """Whether the pool lies on a GPU."""
        return self.device.startswith("cuda")


def describe_end(
    config: KVTransferConfig, device: torch.device, *, no_shared_memory: str = ""
) -> LinkEnd:
    """Describe a worker of this process."""
    return LinkEnd(
        backend=config.backend,
        device=_device_name(device),
        boot_id=_read_boot_id(),
        network_namespace=_network_namespace(),
        user_id=os.geteuid(),
        interface=config.interface,
        no_shared_memory=no_shared_memory,
    )


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    # An index means nothing to a process that sees other devices.
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _network_namespace() -> str:
    try:
        status = Path("/proc/self/ns/net").stat()
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"
