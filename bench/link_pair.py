"""Two processes and the links between them, told what to do step by step.

The rendezvous travels over a pipe, as it does over the control plane of a cluster. Needs neither
Ray nor gRPC, so that it runs on a machine that has nothing but torch and GPUs.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from kv_transfer import nccl_settings
from kv_transfer.backend import Operation
from kv_transfer.config import KVTransferConfig
from kv_transfer.link import Link, LinkSpec
from kv_transfer.store import RendezvousStore

TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 120.0


class End:
    """What one of the two processes can do; runs there."""

    def __init__(self, device: str, rendezvous: Connection) -> None:
        self._device = torch.device(device)
        self._rendezvous = rendezvous
        self._stores: dict[str, RendezvousStore] = {}
        self._links: dict[str, Link] = {}
        self._posted: list[tuple[Operation, torch.Tensor]] = []
        # entries of links this end has not begun yet
        self._early: list[tuple[str, str, bytes]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._deliver, daemon=True).start()

    def build(self, link_id: str, *, is_sender: bool, backend: str) -> float:
        """Make and probe a link; the bytes per second of the probe."""
        spec = LinkSpec(
            link_id=link_id,
            is_sender=is_sender,
            backend=backend,
            timeout_s=TIMEOUT_S,
            device=self._device,
        )
        link = Link(spec, self._store(link_id))
        self._links[link_id] = link
        link.build()
        return link.probe()

    def send(self, link_id: str, num_bytes: int, value: int = 1) -> float:
        """Send bytes that are all `value`; the seconds it took."""
        tensor = torch.full((num_bytes,), value, dtype=torch.uint8, device=self._device)
        return self._time(lambda: self._links[link_id].send(tensor))

    def receive(self, link_id: str, num_bytes: int, value: int = 1) -> float:
        """Receive and check bytes; the seconds it took."""
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        elapsed_s = self._time(lambda: self._links[link_id].receive(tensor))
        assert bool((tensor == value).all()), "other bytes arrived than were sent"
        return elapsed_s

    def post_receive(self, link_id: str, num_bytes: int) -> None:
        """Post a receive that nobody may ever answer: its kernel spins."""
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._posted.append((self._links[link_id].receive(tensor), tensor))

    def abort(self, link_id: str) -> float:
        """End a link and free it; the seconds until the abort was back."""
        link = self._links.pop(link_id)
        started = time.monotonic()
        link.abort("told to")
        elapsed_s = time.monotonic() - started
        link.close()
        return elapsed_s

    def copy_on_device(self, num_bytes: int) -> float:
        """Copy within the device, the yardstick; the seconds it took."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        self._synchronize()
        started = time.monotonic()
        target.copy_(source)
        self._synchronize()
        return time.monotonic() - started

    def used_bytes(self) -> int:
        """Memory in use on the device, by everybody."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def missing_settings(self) -> list[str]:
        """Settings of NCCL and torch that this process lacks."""
        return nccl_settings.missing(KVTransferConfig(), os.environ)

    def set_max_ctas(self, max_ctas: int) -> None:
        """For links that are made from now on."""
        from kv_transfer import nccl_channel  # noqa: PLC0415 - a setting of this bench alone

        nccl_channel.MAX_CTAS = max_ctas

    def _time(self, post: Any) -> float:
        self._synchronize()
        started = time.monotonic()
        post().wait(TIMEOUT_S)
        return time.monotonic() - started

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _store(self, link_id: str) -> RendezvousStore:
        store = RendezvousStore(
            lambda key, value: self._rendezvous.send((link_id, key, value)), timeout_s=TIMEOUT_S
        )
        with self._lock:
            self._stores[link_id] = store
            for entry in [each for each in self._early if each[0] == link_id]:
                self._early.remove(entry)
                store.deliver(*entry[1:])
        return store

    def _deliver(self) -> None:
        try:
            while True:
                link_id, key, value = self._rendezvous.recv()
                with self._lock:
                    if link_id in self._stores:
                        self._stores[link_id].deliver(key, value)
                    else:
                        self._early.append((link_id, key, value))
        except (EOFError, OSError):
            return


class Remote:
    """The parent's handle of one process."""

    def __init__(self, device: str, rendezvous: Connection, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self.process = context.Process(target=_obey, args=(device, far, rendezvous), daemon=True)
        before = dict(os.environ)
        # A child imports torch before any line of ours runs there.
        nccl_settings.apply(KVTransferConfig(), os.environ)
        os.environ.update(environment)
        try:
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        far.close()

    def begin(self, name: str, *args: Any, **options: Any) -> None:
        """Tell the process to do something; `finish` waits for it."""
        self._pipe.send((name, args, options))

    def finish(self) -> Any:
        """Return what it did; RuntimeError when that failed."""
        if not self._pipe.poll(_ANSWER_TIMEOUT_S):
            raise TimeoutError("no answer from the other process")
        error, result = self._pipe.recv()
        if error:
            raise RuntimeError(error)
        return result

    def do(self, name: str, *args: Any, **options: Any) -> Any:
        """Both at once."""
        self.begin(name, *args, **options)
        return self.finish()

    def kill(self) -> None:
        """End the process, stopped or not."""
        self.process.kill()
        self.process.join()


class LinkPair:
    """A sending and a receiving process."""

    def __init__(
        self, devices: tuple[str, str], environments: tuple[Mapping[str, str], Mapping[str, str]]
    ) -> None:
        near, far = multiprocessing.get_context("spawn").Pipe()
        self.sender = Remote(devices[0], near, environments[0])
        self.receiver = Remote(devices[1], far, environments[1])

    def build(self, link_id: str, *, backend: str = "nccl") -> float:
        """Make a link on both sides; the bytes per second the receiver saw."""
        self.sender.begin("build", link_id, is_sender=True, backend=backend)
        self.receiver.begin("build", link_id, is_sender=False, backend=backend)
        self.sender.finish()
        return float(self.receiver.finish())

    def move(self, link_id: str, num_bytes: int, value: int = 1) -> float:
        """Move bytes; the receiver's seconds."""
        self.sender.begin("send", link_id, num_bytes, value)
        self.receiver.begin("receive", link_id, num_bytes, value)
        self.sender.finish()
        return float(self.receiver.finish())

    def abort(self, link_id: str) -> tuple[float, float]:
        """End a link on both sides; the seconds each abort took."""
        self.sender.begin("abort", link_id)
        self.receiver.begin("abort", link_id)
        return float(self.sender.finish()), float(self.receiver.finish())

    def close(self) -> None:
        """End both processes."""
        self.sender.kill()
        self.receiver.kill()


def _obey(device: str, pipe: Connection, rendezvous: Connection) -> None:
    end = End(device, rendezvous)
    try:
        while True:
            name, args, options = pipe.recv()
            try:
                pipe.send(("", getattr(end, name)(*args, **options)))
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                pipe.send((f"{type(error).__name__}: {error}", None))
    except (EOFError, OSError):
        os._exit(0)
