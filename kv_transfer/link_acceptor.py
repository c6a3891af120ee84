"""The prefill side of the links: takes what the decode workers dial, newest generation first."""

import asyncio
import logging
from contextlib import suppress

from kv_transfer.accepted_link import AcceptedLink
from kv_transfer.backend import LinkBrokenError
from kv_transfer.backend_choice import BackendChoice, NoBackendError, choose_backend
from kv_transfer.config import KVTransferConfig
from kv_transfer.control import (
    ControlClosedError,
    LinkAccepted,
    LinkControl,
    LinkIncompatible,
    LinkOpen,
    StaleLinkError,
    WorkerRef,
)
from kv_transfer.layout import incompatibility
from kv_transfer.link import Link, LinkSpec
from kv_transfer.link_end import describe_end
from kv_transfer.link_status import LinkState, LinkStatus
from kv_transfer.live_link import LinkFactory, LiveLink
from kv_transfer.peer_link import LinkIdentity, link_id

logger = logging.getLogger(__name__)


class LinkAcceptor:
    """Owns every link of a prefill worker; all methods are for the event loop.

    Invariant: one live link per decode worker id, that of the highest (incarnation, generation).
    """

    def __init__(
        self,
        identity: LinkIdentity,
        *,
        config: KVTransferConfig,
        make_link: LinkFactory = Link,
    ) -> None:
        self._identity = identity
        self._config = config
        self._end = describe_end(
            config,
            identity.device,
            no_shared_memory="" if identity.shared_pool else "its pool lies in private memory",
        )
        self._make_link = make_link
        self._newest: dict[str, tuple[int, int]] = {}
        self._links: dict[str, tuple[LiveLink, AcceptedLink]] = {}
        # also those that were replaced, and those whose peer may still read our pool
        self._lives: set[LiveLink] = set()
        self._is_closed = False

    async def serve(self, open_message: LinkOpen, control: LinkControl) -> None:
        """Run one link for as long as its control stream and its process group live.

        StaleLinkError when the message is older than what was seen, or means another process.
        """
        self._admit(open_message)
        try:
            choice = self._agree(open_message)
            await control.send(LinkAccepted(self._identity.layout, choice.backend, choice.reason))
        except NoBackendError as error:
            with suppress(ControlClosedError):
                await control.send(LinkIncompatible(str(error)))
            return
        except ControlClosedError:
            return
        await self._run(open_message, choice, control)

    def link_for(
        self, decode_worker: WorkerRef, generation: int | None = None
    ) -> AcceptedLink | None:
        """Return the live link of exactly this process, and of this generation if one is named."""
        _, link = self._links.get(decode_worker.worker_id, (None, None))
        if link is None or not link.is_usable or link.decode_worker != decode_worker:
            return None
        return link if generation in (None, link.generation) else None

    def statuses(self) -> list[LinkStatus]:
        """Describe the live links; the decode side knows about the others."""
        return [
            LinkStatus(
                peer_id=link.decode_worker.worker_id,
                peer_incarnation=link.decode_worker.incarnation,
                state=LinkState.READY,
                generation=link.generation,
                backend=link.choice.backend,
                reason=link.choice.reason,
                bandwidth_bytes_per_s=live.bandwidth_bytes_per_s,
            )
            for live, link in self._links.values()
            if link.is_usable and live.is_built
        ]

    async def close(self) -> None:
        """End all links and let `serve` return."""
        self._is_closed = True
        await asyncio.gather(*(live.close("worker stops") for live in list(self._lives)))
        for live in self._lives:
            live.forget_peer()

    def _admit(self, open_message: LinkOpen) -> None:
        worker = open_message.decode_worker
        if self._is_closed:
            raise StaleLinkError("the worker stops")
        if open_message.prefill_incarnation != self._identity.worker.incarnation:
            raise StaleLinkError(f"incarnation {open_message.prefill_incarnation} is not here")
        age = (worker.incarnation, open_message.generation)
        if age <= self._newest.get(worker.worker_id, (0, 0)):
            raise StaleLinkError(f"generation {open_message.generation} is not the newest")
        self._newest[worker.worker_id] = age
        if replaced := self._links.pop(worker.worker_id, None):
            replaced[0].fail(f"replaced by generation {open_message.generation}")

    def _agree(self, open_message: LinkOpen) -> BackendChoice:
        if reason := incompatibility(self._identity.layout, open_message.layout):
            raise NoBackendError(reason)
        return choose_backend(self._end, open_message.end)

    async def _run(
        self, open_message: LinkOpen, choice: BackendChoice, control: LinkControl
    ) -> None:
        worker = open_message.decode_worker
        live = LiveLink(
            LinkSpec(
                link_id=link_id(open_message, self._identity.worker),
                is_sender=True,
                backend=choice.backend,
                timeout_s=self._config.transfer_timeout_s,
                device=self._identity.device,
                interface=self._config.interface,
                shared_pool=self._identity.shared_pool,
                on_stuck=self._identity.stuck_links.append,
            ),
            control,
            peer_layout=open_message.layout,
            make_link=self._make_link,
        )
        link = AcceptedLink(
            live, choice=choice, decode_worker=worker, generation=open_message.generation
        )
        self._lives.add(live)
        live.unread.add_done_callback(lambda _: self._lives.discard(live))
        self._links[worker.worker_id] = (live, link)
        reason = "served no longer"
        try:
            await live.build()
            await live.send_ready()
            # shielded: a cancelled wait must not cancel what everyone else waits for
            reason = await asyncio.shield(live.ended)
        except (LinkBrokenError, ControlClosedError) as error:
            reason = str(error)
        finally:
            if self._links.get(worker.worker_id, (None, None))[1] is link:
                del self._links[worker.worker_id]
            logger.info("link %s ends: %s", live.spec.link_id, reason)
            await live.close(reason)
