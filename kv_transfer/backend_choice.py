"""Which backend a pair of workers is linked with, and why.

    both pools on GPUs, not the same one           nccl
    both in the memory of one host                 shared_memory
    everything else                                gloo

`kv_transfer.backend` of either end may name one instead of `auto`; then it is that one or none.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.link_end import LinkEnd


class NoBackendError(Exception):
    """The pair can never link; says why, for people."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What a link is made with; the reason is for people."""

    backend: str
    reason: str


def choose_backend(prefill: LinkEnd, decode: LinkEnd) -> BackendChoice:
    """Choose for one pair; NoBackendError when nothing fits."""
    wishes = {prefill.backend, decode.backend} - {"auto"}
    if len(wishes) > 1:
        raise NoBackendError(
            f"kv_transfer.backend: {prefill.backend!r} at the prefill worker, "
            f"{decode.backend!r} at the decode worker"
        )
    if wishes:
        (backend,) = wishes
        if problem := _OBSTACLES[backend](prefill, decode):
            raise NoBackendError(f"{backend}: {problem}")
        return BackendChoice(backend, "set by kv_transfer.backend")
    return _choose_freely(prefill, decode)


def _choose_freely(prefill: LinkEnd, decode: LinkEnd) -> BackendChoice:
    preferred, virtue = "shared_memory", "both pools lie in the memory of one host"
    if prefill.is_on_gpu and decode.is_on_gpu:
        preferred, virtue = "nccl", "the pools lie on two GPUs"
    obstacle = _OBSTACLES[preferred](prefill, decode)
    if not obstacle:
        return BackendChoice(preferred, virtue)
    if problem := _gloo_obstacle(prefill, decode):
        raise NoBackendError(f"{preferred}: {obstacle}; gloo: {problem}")
    return BackendChoice("gloo", f"not {preferred}: {obstacle}")


def _nccl_obstacle(prefill: LinkEnd, decode: LinkEnd) -> str:
    if not (prefill.is_on_gpu and decode.is_on_gpu):
        return "not both pools lie on GPUs"
    if prefill.device == decode.device:
        return "both pools lie on the same GPU, and NCCL joins no GPU with itself"
    return ""


def _shared_memory_obstacle(prefill: LinkEnd, decode: LinkEnd) -> str:
    if prefill.is_on_gpu or decode.is_on_gpu:
        return "not both pools lie in host memory"
    for name, end in (("prefill", prefill), ("decode", decode)):
        if end.no_shared_memory:
            return f"the {name} worker has none: {end.no_shared_memory}"
    return _distance(prefill, decode)


def _distance(prefill: LinkEnd, decode: LinkEnd) -> str:
    """What lies between two processes that cannot hand each other a descriptor."""
    if not prefill.boot_id or not prefill.network_namespace:
        return "the system does not say which host it is"
    if prefill.boot_id != decode.boot_id:
        return "the workers run on two hosts"
    if prefill.network_namespace != decode.network_namespace:
        return "the workers run in two network namespaces of one host"
    if prefill.user_id != decode.user_id:
        return f"the workers run as two users, {prefill.user_id} and {decode.user_id}"
    return ""


def _gloo_obstacle(prefill: LinkEnd, decode: LinkEnd) -> str:
    places = [(end.boot_id, end.network_namespace) for end in (prefill, decode)]
    if places[0] == places[1] or not all(places[0]) or not all(places[1]):
        return ""
    if prefill.interface and decode.interface:
        return ""
    return (
        "it would listen on the loopback address, which the workers do not share; "
        "set kv_transfer.interface to the network that joins them"
    )


_OBSTACLES: dict[str, Callable[[LinkEnd, LinkEnd], str]] = {
    "nccl": _nccl_obstacle,
    "shared_memory": _shared_memory_obstacle,
    "gloo": _gloo_obstacle,
}
