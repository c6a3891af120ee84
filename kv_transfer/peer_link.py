"""The link to one prefill worker through its generations."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kv_transfer.backend import LinkBrokenError
from kv_transfer.config import BACKENDS, KVTransferConfig
from kv_transfer.control import (
    ControlClosedError,
    LinkAccepted,
    LinkControl,
    LinkIncompatible,
    LinkOpen,
    PeerInfo,
    WorkerRef,
)
from kv_transfer.dialed_link import DialedLink
from kv_transfer.layout import KVLayout, incompatibility
from kv_transfer.link import LinkSpec
from kv_transfer.link_end import describe_end
from kv_transfer.link_status import LinkState, LinkStatus
from kv_transfer.live_link import LinkFactory, LiveLink
from kv_transfer.place import NOWHERE, Place
from kv_transfer.shared_memory_channel import SharedMemoryUnavailableError, SharedPool

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
# a link that lived less long counts as one more failure, so that it does not flap
_STABLE_AFTER_S = 2.0
# attempts in a row
_FAILING_AFTER = 3


class IncompatiblePeerError(Exception):
    """The two pools can never exchange KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkIdentity:
    """Who a worker is to its links, and what its pool looks like."""

    worker: WorkerRef
    layout: KVLayout
    device: torch.device
    place: Place = NOWHERE
    # the pool as peers on this host may map it; None where they may not
    shared_pool: SharedPool | None = None
    # links whose abort hangs, by id; a worker that has one must be replaced
    stuck_links: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialSettings:
    """What all links of one decode worker are made with."""

    identity: LinkIdentity
    config: KVTransferConfig
    connect: Callable[[PeerInfo], LinkControl]
    next_generation: Callable[[str], int]
    # whether any fresh view has the peer: one that nobody knows is not dialled again
    is_known: Callable[[str], bool]
    on_change: Callable[[], None]
    make_link: LinkFactory
    now: Callable[[], float] = time.monotonic


def link_id(open_message: LinkOpen, prefill_worker: WorkerRef) -> str:
    """Name one generation the same on both sides."""
    decode = open_message.decode_worker
    return (
        f"{prefill_worker.worker_id}.{prefill_worker.incarnation}-"
        f"{decode.worker_id}.{decode.incarnation}-g{open_message.generation}"
    )


class PeerLink:
    """Keeps one link alive with a task of its own. Invariant: at most one generation lives."""

    def __init__(self, peer: PeerInfo, settings: DialSettings) -> None:
        self.peer = peer
        self.link: DialedLink | None = None
        self.state = LinkState.CONNECTING
        self._settings = settings
        # as configured, until the peer has agreed to one
        self._backend = settings.config.backend
        self._backend_reason = ""
        # what went wrong with it here, so that the next generation goes another way
        self._no_shared_memory = ""
        self._generation = 0
        self._reason = ""
        self._num_failures = 0
        self._live: LiveLink | None = None
        self._is_retiring = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    @property
    def is_ready(self) -> bool:
        """Whether new transfers may use the link."""
        link = self.link
        return link is not None and link.is_usable and not self._is_retiring.is_set()

    @property
    def is_failing(self) -> bool:
        """Whether it was tried often enough to give others its place."""
        return self.state is not LinkState.READY and self._num_failures >= _FAILING_AFTER

    @property
    def is_over(self) -> bool:
        """Whether its task has ended."""
        return self._task.done()

    def retire(self) -> None:
        """Stop making generations; a link that is in use ends when it is idle."""
        self._is_retiring.set()

    async def close(self, reason: str) -> None:
        """End the link now."""
        self._is_retiring.set()
        self._reason = reason
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._live is not None:
            await self._live.close(reason)

    def status(self) -> LinkStatus:
        """Describe the link as it is now."""
        link = self.link
        return LinkStatus(
            peer_id=self.peer.worker.worker_id,
            peer_incarnation=self.peer.worker.incarnation,
            state=self.state,
            generation=self._generation,
            backend=self._backend,
            reason=self._reason,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s if link else 0.0,
            latency_s=link.latency_s if link else 0.0,
            queued_bytes=link.queued_bytes if link else 0,
            moved_bytes=link.moved_bytes if link else 0,
        )

    async def _keep(self) -> None:
        while not self._is_retiring.is_set():
            self._generation = self._settings.next_generation(self.peer.worker.worker_id)
            self._enter(LinkState.CONNECTING, self._reason)
            try:
                link = await self._dial()
            except IncompatiblePeerError as error:
                self._enter(LinkState.INCOMPATIBLE, str(error))
                await self._is_retiring.wait()
                return
            except (LinkBrokenError, ControlClosedError, TimeoutError) as error:
                self._num_failures += 1
                if isinstance(error, SharedMemoryUnavailableError):
                    self._no_shared_memory = str(error)
                self._enter(LinkState.BROKEN, str(error) or "no answer in time")
            else:
                await self._use(link)
            await self._pause()
            if not self._settings.is_known(self.peer.worker.worker_id):
                return

    async def _use(self, link: DialedLink) -> None:
        self.link = link
        started = self._settings.now()
        self._enter(LinkState.READY, self._backend_reason)
        try:
            while not link.live.ended.done():
                retiring = asyncio.ensure_future(self._is_retiring.wait())
                either: set[asyncio.Future[Any]] = {retiring, link.live.ended}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                retiring.cancel()
                if self._is_retiring.is_set():
                    await link.wait_idle()
                    break
            reason = link.live.ended.result() if link.live.ended.done() else "not needed any more"
        except asyncio.CancelledError:
            reason = self._reason
            raise
        finally:
            self.link = None
            # at once: closing may take a while, and nobody shall be routed here meanwhile
            self._enter(LinkState.BROKEN, reason)
            await link.live.close(reason)
        is_stable = self._settings.now() - started >= _STABLE_AFTER_S
        self._num_failures = 0 if is_stable else self._num_failures + 1

    async def _dial(self) -> DialedLink:
        settings, identity = self._settings, self._settings.identity
        open_message = LinkOpen(
            decode_worker=identity.worker,
            generation=self._generation,
            layout=identity.layout,
            end=describe_end(
                settings.config, identity.device, no_shared_memory=self._no_shared_memory
            ),
            prefill_incarnation=self.peer.worker.incarnation,
        )
        control = settings.connect(self.peer)
        started = settings.now()
        try:
            async with asyncio.timeout(settings.config.transfer_timeout_s):
                answer = await self._greet(control, open_message)
        except BaseException:
            await control.close()
            raise
        latency_s = settings.now() - started
        self._backend, self._backend_reason = answer.backend, answer.reason
        self._live = live = LiveLink(
            LinkSpec(
                link_id=link_id(open_message, self.peer.worker),
                is_sender=False,
                backend=self._backend,
                timeout_s=settings.config.transfer_timeout_s,
                device=identity.device,
                interface=settings.config.interface,
                on_stuck=identity.stuck_links.append,
            ),
            control,
            peer_layout=answer.layout,
            make_link=settings.make_link,
        )
        try:
            await live.build()
            await live.wait_peer_ready()
        except BaseException as error:
            await live.close(str(error) or type(error).__name__)
            raise
        return DialedLink(
            live,
            worker=identity.worker,
            peer=self.peer,
            generation=self._generation,
            latency_s=latency_s,
            now=settings.now,
        )

    async def _greet(self, control: LinkControl, open_message: LinkOpen) -> LinkAccepted:
        await control.send(open_message)
        answer = await control.receive()
        if isinstance(answer, LinkIncompatible):
            raise IncompatiblePeerError(answer.reason)
        if not isinstance(answer, LinkAccepted):
            raise LinkBrokenError(f"unexpected answer {type(answer).__name__}")
        if reason := incompatibility(open_message.layout, answer.layout):
            raise IncompatiblePeerError(reason)
        if answer.backend not in BACKENDS:
            raise LinkBrokenError(f"unknown backend {answer.backend!r}")
        return answer

    async def _pause(self) -> None:
        if self._is_retiring.is_set():
            return
        if not self._num_failures:
            return  # it had worked: whatever broke it may be over
        longest_s = min(_FIRST_PAUSE_S * 2 ** min(self._num_failures - 1, 10), _LONGEST_PAUSE_S)
        try:
            async with asyncio.timeout(random.uniform(0.5, 1.0) * longest_s):
                await self._is_retiring.wait()
        except TimeoutError:
            return

    def _enter(self, state: LinkState, reason: str) -> None:
        if (state, reason) != (self.state, self._reason):
            logger.info(
                "link to %s generation %d: %s %s",
                self.peer.worker.worker_id,
                self._generation,
                state,
                reason,
            )
        self.state, self._reason = state, reason
        self._settings.on_change()
