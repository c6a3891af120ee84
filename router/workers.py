"""Who is alive, how loaded, and what they cache: fed by discovery and the workers' state streams.

Tasks: one asks discovery (poller.py), one looks for frozen workers, and each worker process has
one that holds its state stream (watch.py) and, for a decode worker, one that tells it its peers
(peers.py). Nothing here runs on the path of a request.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from relevo.v1 import common_pb2

from router.discovery import Discovery
from router.fleet import Fleet
from router.peers import PeerAnnouncer
from router.poller import DiscoveryPoller
from router.watch import watch_worker
from router.worker_state import WorkerState
from router.worker_view import DECODE, PREFILL, WorkerKey
from rpc.channel import ChannelPool
from rpc.description import WorkerDescription

LIFE_CHECK_S = 0.25
LOST_SHOWN_S = 60.0

_LOGGER = logging.getLogger(__name__)


class OnChange(Protocol):
    """Told after something changed that routing cares about."""

    def __call__(self, *, is_membership: bool) -> None:
        """`is_membership`: somebody came or was lost."""
        ...


class Workers:
    """Owns the fleet and the tasks that feed it.

    Invariant: between `start` and `stop` each worker that is described or connected has a task.
    """

    def __init__(
        self,
        discovery: Discovery,
        channels: ChannelPool,
        *,
        ingress_id: str,
        on_change: OnChange,
        now: Callable[[], float],
    ) -> None:
        self._channels = channels
        self._ingress_id = ingress_id
        self._on_change = on_change
        self._now = now
        self.fleet = Fleet()
        self._workers = self.fleet.states
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._announcers: dict[WorkerKey, PeerAnnouncer] = {}
        self._background: list[asyncio.Task[None]] = []
        self._poller = DiscoveryPoller(
            discovery, apply=self.apply_descriptions, is_in_need=self._has_nobody, now=now
        )
        self.look_again = self._poller.look_again
        self.expect_change = self._poller.expect_change

    async def start(self) -> None:
        """Begin to look for workers; returns at once."""
        self._background = [
            asyncio.create_task(self._poller.run(), name="router-discovery"),
            asyncio.create_task(self._keep_checking_life(), name="router-life"),
        ]

    async def stop(self) -> None:
        """End every task and stream."""
        tasks = [*self._background, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._background = []
        self._tasks.clear()

    # What others read.

    def all(self) -> list[WorkerState]:
        """Live and lost ones."""
        return list(self._workers.values())

    def get(self, key: WorkerKey) -> WorkerState | None:
        """One of them."""
        return self._workers.get(key)

    def distrust_links(self, peer: WorkerKey) -> None:
        """A transfer from this prefill worker failed: wait for news of its links."""
        for worker in self._workers.values():
            worker.distrust_link(peer)

    # Discovery.

    def apply_descriptions(self, descriptions: Sequence[WorkerDescription]) -> None:
        """Follow new workers; mark the ones that are no longer described."""
        described = {WorkerKey(each.worker_id, each.incarnation): each for each in descriptions}
        for key, worker in self._workers.items():
            worker.is_described = key in described
        for key, description in described.items():
            if not self._is_superseded(key) and not self._is_followed(key):
                self._follow(key, description)
        self._forget_old()

    def _has_nobody(self) -> bool:
        return not any(worker.is_connected for worker in self._workers.values())

    def _is_followed(self, key: WorkerKey) -> bool:
        return key in self._tasks and not self._tasks[key].done()

    def _is_superseded(self, key: WorkerKey) -> bool:
        return any(
            other.worker_id == key.worker_id and other.incarnation > key.incarnation
            for other in self._workers
        )

    def _follow(self, key: WorkerKey, description: WorkerDescription) -> None:
        if description.pool not in self.fleet.indexes:
            _LOGGER.error("Worker %s has an unknown pool %r", key.worker_id, description.pool)
            return
        _LOGGER.info("Following worker %s (%s)", key.worker_id, description.address)
        worker = self._workers.get(key)
        if worker is None:
            worker = self.fleet.add(description, now_s=self._now())
        self._tasks[key] = asyncio.create_task(self._watch(worker), name=f"watch-{key.worker_id}")
        self.look_again()

    async def _watch(self, worker: WorkerState) -> None:
        announcing: asyncio.Task[None] | None = None
        if worker.description.pool == DECODE:
            announcer = PeerAnnouncer(
                address=worker.description.address,
                channels=self._channels,
                ingress_id=self._ingress_id,
                list_peers=self._list_peers,
            )
            self._announcers[worker.key] = announcer
            announcing = asyncio.create_task(announcer.run())
        try:
            await watch_worker(
                worker,
                self._channels,
                ingress_id=self._ingress_id,
                on_change=self._worker_changed,
                now=self._now,
            )
        finally:
            self._announcers.pop(worker.key, None)
            if announcing is not None:
                announcing.cancel()
            worker.disconnect(now_s=self._now())
            if not any(map(worker.shares_address, self._workers.values())):
                await self._channels.forget(worker.description.address)

    def _worker_changed(self, worker: WorkerState, *, is_membership: bool) -> None:
        if is_membership:
            self._drop_predecessors(worker)
            self.look_again()
            self._announce_peers()
        self._on_change(is_membership=is_membership)

    def _drop_predecessors(self, worker: WorkerState) -> None:
        # One row for each place in a pool: its new holder replaces the lost one.
        for key in [k for k, other in self._workers.items() if self._replaces(worker, other)]:
            self._retire(key)

    @staticmethod
    def _replaces(worker: WorkerState, other: WorkerState) -> bool:
        return (
            worker.is_connected
            and other.key.worker_id == worker.key.worker_id
            and other.key.incarnation < worker.key.incarnation
        )

    def _retire(self, key: WorkerKey) -> None:
        worker = self.fleet.remove(key)
        worker.fail_attempts("a newer process took its place")
        if task := self._tasks.pop(key, None):
            task.cancel()

    def _forget_old(self) -> None:
        for key, worker in list(self._workers.items()):
            lost_at_s = worker.lost_at_s
            is_old = lost_at_s is None or self._now() - lost_at_s > LOST_SHOWN_S
            if is_old and not worker.is_described and not self._is_followed(key):
                self._retire(key)

    # Peers.

    def _list_peers(self) -> list[common_pb2.Peer]:
        return [
            worker.description.to_peer()
            for worker in self._workers.values()
            if worker.description.pool == PREFILL and worker.is_connected
        ]

    def _announce_peers(self) -> None:
        for announcer in self._announcers.values():
            announcer.announce()

    # Signs of life.

    async def _keep_checking_life(self) -> None:
        checked_at_s = self._now()
        while True:
            await asyncio.sleep(LIFE_CHECK_S)
            late_s = self._now() - checked_at_s - LIFE_CHECK_S
            checked_at_s = self._now()
            # After a stall of our own, read what arrived meanwhile before judging anyone.
            if late_s < 2 * LIFE_CHECK_S:
                self.check_life()

    def check_life(self) -> None:
        """Stop using frozen workers and end what runs on them."""
        now_s = self._now()
        for worker in self._workers.values():
            if worker.is_silent(now_s) and worker.give_up(now_s=now_s):
                _LOGGER.warning("Worker %s shows no sign of life", worker.key.worker_id)
                self._worker_changed(worker, is_membership=True)
