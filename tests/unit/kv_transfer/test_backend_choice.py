"""Which backend a pair gets, and what it is told."""

import pytest

from kv_transfer.backend_choice import BackendChoice, NoBackendError, choose_backend
from kv_transfer.config import BACKENDS, KVTransferConfig
from kv_transfer.link_end import LinkEnd, describe_end
from tests.unit.kv_transfer.fakes import CPU

HOST = {"boot_id": "b", "network_namespace": "4:1", "user_id": 10}


def end(**changes: object) -> LinkEnd:
    return LinkEnd(**{**HOST, **changes})


CPU_PAIR = (end(), end())
GPU_PAIR = (end(device="cuda:GPU-1"), end(device="cuda:GPU-2"))


@pytest.mark.parametrize(
    ("prefill", "decode", "backend", "reason"),
    [
        (*CPU_PAIR, "shared_memory", "one host"),
        (*GPU_PAIR, "nccl", "two GPUs"),
        (GPU_PAIR[0], GPU_PAIR[0], "gloo", "same GPU"),
        (GPU_PAIR[0], end(), "gloo", "not both pools lie in host memory"),
        (end(no_shared_memory="full"), end(), "gloo", "prefill worker has none: full"),
        (end(), end(no_shared_memory="refused"), "gloo", "decode worker has none: refused"),
        (end(user_id=0), end(), "gloo", "two users, 0 and 10"),
        (end(boot_id=""), end(boot_id=""), "gloo", "does not say"),
        (end(interface="a"), end(boot_id="c", interface="a"), "gloo", "two hosts"),
        (
            end(interface="a"),
            end(network_namespace="4:2", interface="a"),
            "gloo",
            "two network namespaces",
        ),
        (end(backend="gloo"), end(), "gloo", "set by kv_transfer.backend"),
        (end(), end(backend="gloo"), "gloo", "set by kv_transfer.backend"),
        (end(backend="shared_memory"), end(), "shared_memory", "set by kv_transfer.backend"),
        (end(backend="gloo"), GPU_PAIR[0], "gloo", "set by kv_transfer.backend"),
    ],
)
def test_a_pair_gets_its_backend_and_the_reason(
    prefill: LinkEnd, decode: LinkEnd, backend: str, reason: str
) -> None:
    choice = choose_backend(prefill, decode)
    assert choice.backend == backend
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (end(backend="gloo"), end(backend="nccl"), "'gloo' at the prefill worker"),
        (end(backend="nccl"), end(), "nccl: not both pools lie on GPUs"),
        (end(backend="shared_memory"), end(boot_id="c"), "shared_memory: the workers run on two"),
        (end(), end(boot_id="c"), "set kv_transfer.interface"),
        (end(backend="gloo"), end(network_namespace="4:2"), "set kv_transfer.interface"),
    ],
)
def test_a_pair_that_cannot_link_is_told_why(
    prefill: LinkEnd, decode: LinkEnd, reason: str
) -> None:
    with pytest.raises(NoBackendError, match=reason):
        choose_backend(prefill, decode)


def test_workers_of_one_process_share_memory() -> None:
    here = describe_end(KVTransferConfig(), CPU)
    assert choose_backend(here, here) == BackendChoice(
        "shared_memory", "both pools lie in the memory of one host"
    )


def test_only_known_backends_are_accepted() -> None:
    for backend in BACKENDS:
        KVTransferConfig(backend=backend)
    with pytest.raises(ValueError, match="backend"):
        KVTransferConfig(backend="nixl")


def test_ports_no_backend_lets_one_choose_are_refused_with_what_does() -> None:
    with pytest.raises(ValueError, match=r"port_range.*net\.ipv4\.ip_local_port_range"):
        KVTransferConfig(port_range="20000-20100")
