"""What NCCL and torch's wrapper around it must be told before torch is imported.

By default torch's watchdog, heartbeat monitor and dump logic may end the whole process because one
peer died. Here a link may cost only itself: our own code owns every deadline, so all of that is
off. torch reads most of these variables once, at import or when the first group is built; the
workers' entry sets them first.
"""

import math
from collections.abc import Mapping, MutableMapping

from kv_transfer.config import KVTransferConfig

# Variables that would undo the settings below or order kernels of different links behind each
# other.
_UNWANTED = ("NCCL_LAUNCH_ORDER_IMPLICIT", "TORCH_NCCL_USE_COMM_NONBLOCKING")


def environment(config: KVTransferConfig) -> dict[str, str]:
    """Return the variables a worker sets before its first import of torch."""
    interface = config.interface or "lo"
    return {
        # neither the watchdog nor the heartbeat monitor thread starts
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
        "TORCH_NCCL_DESYNC_DEBUG": "0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        # bounds every wait for a communicator that is still being made
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(config.transfer_timeout_s)),
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "NCCL_CUMEM_ENABLE": "1",
        # its thread listens on a port of its own
        "NCCL_RAS_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": interface,
        "GLOO_SOCKET_IFNAME": interface,
        # links must not share a hardware queue with each other or with the model
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }


def apply(config: KVTransferConfig, environ: MutableMapping[str, str]) -> None:
    """Put the settings into `environ`."""
    for name in _UNWANTED:
        environ.pop(name, None)
    environ.update(environment(config))


def missing(config: KVTransferConfig, environ: Mapping[str, str]) -> list[str]:
    """Names of the settings that `environ` lacks or contradicts."""
    wanted = environment(config)
    wrong = [name for name, value in wanted.items() if environ.get(name) != value]
    return wrong + [name for name in _UNWANTED if name in environ]
