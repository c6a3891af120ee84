"""Gloo as a link's channel: TCP between two CPU pools, bound to one interface.

Gloo's own `abort` and `shutdown` leave a posted receive waiting, and a peer's later send still
lands in its buffer. What does stop everything is a wait that times out: it closes the pair. So
`abort` posts a receive on a tag nobody sends on and lets it time out at once.
"""

import json
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from kv_transfer.backend import LinkBrokenError, LinkTimeoutError
from kv_transfer.listeners import Address, connections_between, with_listener

_DATA_TAG = 0
_POISON_TAG = 1
_POISON_TIMEOUT = timedelta(milliseconds=1)

# torch's stubs lack most of this class
_Group: Any = ProcessGroupGloo


class GlooOperation:
    """A posted send or receive."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        """Block until done; a timeout closes the pair, as Gloo does by itself."""
        try:
            self._work.wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:
            text = str(error)
            if "imed out" in text:
                raise LinkTimeoutError(text) from error
            raise LinkBrokenError(text) from error


class GlooChannel:
    """A two-rank Gloo group.

    Invariant: nothing of it listens anywhere but on `interface`, or at all once it is connected;
    and then at the other end is the process that shares the store.
    """

    def __init__(
        self, store: Store, *, rank: int, group_name: str, interface: str, timeout_s: float
    ) -> None:
        options = _Group._Options()  # noqa: SLF001 - the only door to these settings
        place = {"interface": interface} if interface else {"hostname": "127.0.0.1"}
        try:
            device, listener = with_listener(lambda: _Group.create_device(**place, lazy_init=False))
        except RuntimeError as error:
            raise LinkBrokenError(f"gloo cannot listen on {place}: {error}") from error
        options._devices = [device]  # noqa: SLF001
        # these threads serve collectives, of which there are none here
        options._threads = 1  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        options.global_ranks_in_group = [0, 1]
        options.group_name = group_name
        try:
            group = _Group(PrefixStore(group_name, store), rank, 2, options)
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error
        finally:
            listener.shut()
        self._group: Any = group
        self._peer = 1 - rank
        _check_peer(PrefixStore(f"{group_name}-peer", store), rank, listener.address)

    def send(self, tensor: torch.Tensor) -> GlooOperation:
        """Post a contiguous CPU tensor."""
        try:
            return GlooOperation(self._live_group().send([tensor], self._peer, _DATA_TAG))
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error

    def receive(self, tensor: torch.Tensor) -> GlooOperation:
        """Post a CPU buffer."""
        try:
            return GlooOperation(self._live_group().recv([tensor], self._peer, _DATA_TAG))
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error

    def abort(self) -> None:
        """Poison the pair: posted and later operations of both ends raise."""
        group = self._group
        if group is None:
            return
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _POISON_TAG).wait(
                _POISON_TIMEOUT
            )
        except RuntimeError:
            # the timeout is the means; a pair that is closed already raises too
            return

    def close(self) -> None:
        """Drop the group; its sockets and threads go with it."""
        self._group = None

    def _live_group(self) -> Any:
        if self._group is None:
            raise LinkBrokenError("the link is closed")
        return self._group


def _check_peer(store: Store, rank: int, address: Address | None) -> None:
    """LinkBrokenError unless both ends hold the two ends of one and the same connection.

    Gloo takes whoever is first to connect and to say a number that is easy to guess. What each end
    sees of its connection travels over the store, which strangers cannot write.
    """
    theirs = _exchange(store, rank, "listener", address)
    if address is None or theirs is None:
        return
    ours = connections_between(address, (theirs[0], theirs[1]))
    seen = _exchange(store, rank, "connections", ours)
    mirrored = [[list(remote), list(local)] for local, remote in seen]
    if len(ours) != 1 or [[list(end) for end in each] for each in ours] != mirrored:
        raise LinkBrokenError("somebody else has connected to the link's port")


def _exchange(store: Store, rank: int, what: str, value: Any) -> Any:
    store.set(f"{what}-{rank}", json.dumps(value))
    try:
        return json.loads(store.get(f"{what}-{1 - rank}"))
    except (RuntimeError, OSError) as error:
        raise LinkBrokenError(str(error)) from error
