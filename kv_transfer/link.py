"""One link: the torch half, with its blocking verbs. It has no thread and no control stream.

The prefill worker is rank 0 and only sends, the decode worker is rank 1 and only receives.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kv_transfer.backend import LinkBrokenError, MessageChannel, Operation
from kv_transfer.gloo_channel import GlooChannel
from kv_transfer.nccl_channel import NcclChannel
from kv_transfer.shared_memory_channel import SharedMemoryChannel, SharedPool
from kv_transfer.store import RendezvousStore

logger = logging.getLogger(__name__)

Channel = MessageChannel | SharedMemoryChannel


def _ignore(_link_id: str) -> None:
    return


# First message sizes of a probe set up the transport; the last one is timed.
_PROBE_BYTES = (1, 1 << 16, 1 << 22)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """What both verbs and threads of one link are made from."""

    # unique for each build: peer, incarnations and generation
    link_id: str
    is_sender: bool
    backend: str
    timeout_s: float
    # where the pool lies
    device: torch.device
    interface: str = ""
    # what the peer may map; of the sending side of a link over shared memory
    shared_pool: SharedPool | None = None
    # called with the link's id, on any thread, when its abort hangs: only a new process helps
    on_stuck: Callable[[str], None] = _ignore

    @property
    def is_shared_memory(self) -> bool:
        """Whether the receiver reads the sender's pool itself."""
        return self.backend == "shared_memory"


class Link:
    """A channel of two processes that exists once.

    `abort` may come from any thread at any time; the other verbs block and belong to one thread.
    """

    def __init__(self, spec: LinkSpec, store: RendezvousStore) -> None:
        self.spec = spec
        # where messages lie while they travel: Gloo moves host memory only
        self.device = spec.device if spec.backend == "nccl" else torch.device("cpu")
        # torch holds only the C++ half of the store
        self._store = store
        self._channel: Channel | None = None
        self._closed_channel: Channel | None = None
        self._lock = threading.Lock()
        self._aborted_reason = ""
        self._is_aborted = threading.Event()

    def build(self) -> None:
        """Meet the peer over the store and connect."""
        if self.spec.device.type == "cuda":
            # both belong to the calling thread: copies must not queue up behind the model's kernels
            torch.cuda.set_device(self.spec.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.spec.device))  # type: ignore[no-untyped-call]
        channel = self._make_channel()
        with self._lock:
            self._channel = channel
            reason = self._aborted_reason
        if reason:
            channel.abort()
            raise LinkBrokenError(reason)

    def probe(self) -> float:
        """Move bytes in the direction that is used; return the bytes per second seen."""
        if self.spec.is_shared_memory:
            return self.shared_memory.probe(self.spec.timeout_s)
        elapsed_s = 0.0
        for num_bytes in _PROBE_BYTES:
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            started = time.monotonic()
            operation = self.send(buffer) if self.spec.is_sender else self.receive(buffer)
            operation.wait(self.spec.timeout_s)
            elapsed_s = time.monotonic() - started
        return _PROBE_BYTES[-1] / max(elapsed_s, 1e-9)

    def send(self, tensor: torch.Tensor) -> Operation:
        """Post a contiguous tensor of bytes on `device`."""
        assert self.spec.is_sender, "a receiving link never sends"
        return self._message_channel().send(tensor)

    def receive(self, tensor: torch.Tensor) -> Operation:
        """Post a buffer of bytes on `device`."""
        assert not self.spec.is_sender, "a sending link never receives"
        return self._message_channel().receive(tensor)

    @property
    def shared_memory(self) -> SharedMemoryChannel:
        """The channel of a link over shared memory."""
        channel = self._live_channel()
        assert isinstance(channel, SharedMemoryChannel)
        return channel

    def abort(self, reason: str) -> None:
        """End the link: whoever is blocked in a verb raises, at both ends. Idempotent."""
        with self._lock:
            if self._aborted_reason:
                return
            self._aborted_reason = reason
            channel = self._channel
        self._is_aborted.set()
        self._store.close(reason)
        if channel is not None:
            self._abort_with_deadline(channel)

    def wait_aborted(self, timeout_s: float) -> bool:
        """Block until somebody aborts the link; False when the time is over."""
        return self._is_aborted.wait(timeout_s)

    def close(self) -> None:
        """Free everything; only after the last operation's wait."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._closed_channel = channel

    async def wait_unread(self) -> None:
        """After `close`: wait until the peer can read nothing of ours any more."""
        if isinstance(self._closed_channel, SharedMemoryChannel):
            await self._closed_channel.wait_unread()

    def _make_channel(self) -> Channel:
        spec, rank = self.spec, 0 if self.spec.is_sender else 1
        if spec.is_shared_memory:
            return self._make_shared_memory_channel()
        if spec.backend == "nccl":
            return NcclChannel(
                self._store,
                rank=rank,
                group_name=spec.link_id,
                device=self.device,
                timeout_s=spec.timeout_s,
            )
        return GlooChannel(
            self._store,
            rank=rank,
            group_name=spec.link_id,
            interface=spec.interface,
            timeout_s=spec.timeout_s,
        )

    def _make_shared_memory_channel(self) -> SharedMemoryChannel:
        spec = self.spec
        if not spec.is_sender:
            return SharedMemoryChannel.join(self._store, timeout_s=spec.timeout_s)
        assert spec.shared_pool is not None, "the pool lies in no shared memory"
        return SharedMemoryChannel.serve(
            self._store,
            spec.shared_pool,
            timeout_s=spec.timeout_s,
            is_aborted=self._is_aborted.is_set,
        )

    def _abort_with_deadline(self, channel: Channel) -> None:
        # an abort may hang in the driver when another communicator's kernel spins
        helper = threading.Thread(
            target=channel.abort, name=f"abort-{self.spec.link_id}", daemon=True
        )
        helper.start()
        helper.join(self.spec.timeout_s)
        if helper.is_alive():
            logger.error(
                "link %s: abort did not return in %.1f s", self.spec.link_id, self.spec.timeout_s
            )
            self.spec.on_stuck(self.spec.link_id)

    def _message_channel(self) -> MessageChannel:
        channel = self._live_channel()
        assert not isinstance(channel, SharedMemoryChannel)
        return channel

    def _live_channel(self) -> Channel:
        with self._lock:
            if self._aborted_reason:
                raise LinkBrokenError(self._aborted_reason)
            if self._channel is None:
                raise LinkBrokenError("the link is not built")
            return self._channel
