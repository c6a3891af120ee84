"""The decode side of the links: which exist, how they are made, and made again.

For each chosen peer one `PeerLink` goes round:

    dial (generation + 1) --> CONNECTING --> built, probed, peer ready --> READY --> ended
      ^                          | failed                                             |
      +------- back-off with jitter <------------------ BROKEN <----------------------+
                                 | layouts differ --> INCOMPATIBLE until the peer is another process

It ends when its peer is replaced by a newer incarnation, when it is not chosen any more and has
nothing under way, or when it is down and in nobody's view.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kv_transfer.config import KVTransferConfig
from kv_transfer.control import LinkControl, PeerInfo, WorkerRef
from kv_transfer.dialed_link import DialedLink
from kv_transfer.link import Link
from kv_transfer.link_status import LinkState, LinkStatus
from kv_transfer.live_link import LinkFactory
from kv_transfer.peer_link import DialSettings, LinkIdentity, PeerLink
from kv_transfer.peer_views import VIEW_LIFETIME_S, PeerViews, choose_peers


class LinkDialer:
    """Owns every link of a decode worker; all methods are for the event loop."""

    def __init__(
        self,
        identity: LinkIdentity,
        *,
        config: KVTransferConfig,
        connect: Callable[[PeerInfo], LinkControl],
        now: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
        make_link: LinkFactory = Link,
    ) -> None:
        self._identity = identity
        self._config = config
        self._views = PeerViews(now)
        self._generations: Counter[str] = Counter()
        self._links: dict[str, PeerLink] = {}
        self._failed_at: dict[WorkerRef, float] = {}
        self._now = now
        self._closing: set[asyncio.Task[None]] = set()
        self._settings = DialSettings(
            identity=identity,
            config=config,
            connect=connect,
            next_generation=self._next_generation,
            is_known=lambda peer_id: peer_id in self._views.peers(),
            on_change=on_change,
            make_link=make_link,
            now=now,
        )

    def set_peers(self, ingress_id: str, peers: Sequence[PeerInfo]) -> None:
        """Take one ingress's view of the prefill workers; start and retire links accordingly.

        ValueError when the view is larger than any cluster.
        """
        self._views.update(ingress_id, peers)
        union = self._views.peers()
        self._drop_replaced(union)
        self._note_failing()
        chosen = choose_peers(
            union.values(),
            worker_id=self._identity.worker.worker_id,
            place=self._identity.place,
            max_links=self._config.max_links,
            reach=self._config.reach,
            is_failing=lambda peer: peer.worker in self._failed_at,
        )
        chosen_ids = {peer.worker.worker_id for peer in chosen}
        # A link that works makes way for one that works, not for a name.
        is_settled = all(self.link_for(peer_id) for peer_id in chosen_ids)
        for peer_id in [id_ for id_ in self._links if id_ not in chosen_ids]:
            if is_settled or not self._links[peer_id].is_ready or peer_id not in union:
                self._drop_unchosen(peer_id, is_known=peer_id in union)
        for peer in chosen:
            current = self._links.get(peer.worker.worker_id)
            if current is None or current.is_over:
                self._links[peer.worker.worker_id] = PeerLink(peer, self._settings)

    def link_for(self, peer_id: str, incarnation: int | None = None) -> DialedLink | None:
        """Return the ready link to a peer, if there is one now."""
        current = self._links.get(peer_id)
        if current is None or not current.is_ready:
            return None
        if incarnation is not None and current.peer.worker.incarnation != incarnation:
            return None
        return current.link

    def statuses(self) -> list[LinkStatus]:
        """Describe all links, those being made and those that never will be included."""
        return [link.status() for link in self._links.values() if not link.is_over]

    async def close(self) -> None:
        """End all links."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close("worker stops") for link in links), *self._closing)

    def _note_failing(self) -> None:
        """Remember for a while who could not be linked: others get a chance."""
        now = self._now()
        self._failed_at = {
            worker: at for worker, at in self._failed_at.items() if now - at < VIEW_LIFETIME_S
        }
        for link in self._links.values():
            if link.is_failing:
                self._failed_at.setdefault(link.peer.worker, now)

    def _next_generation(self, peer_id: str) -> int:
        self._generations[peer_id] += 1
        return self._generations[peer_id]

    def _drop_replaced(self, union: dict[str, PeerInfo]) -> None:
        for peer_id, current in list(self._links.items()):
            peer = union.get(peer_id)
            if peer and peer.worker.incarnation > current.peer.worker.incarnation:
                self._close(peer_id, "peer was replaced")

    def _drop_unchosen(self, peer_id: str, *, is_known: bool) -> None:
        current = self._links[peer_id]
        if current.is_over:
            del self._links[peer_id]
        elif is_known:
            # ranked below max_links now: no new transfers, the running ones end by themselves
            current.retire()
        elif current.state is not LinkState.READY:
            self._close(peer_id, "peer is in nobody's view")

    def _close(self, peer_id: str, reason: str) -> None:
        closing = asyncio.get_running_loop().create_task(self._links.pop(peer_id).close(reason))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
