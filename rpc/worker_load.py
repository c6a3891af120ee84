"""The load message of one worker: its engine, its links and the pulse of its engine thread."""

import time
from collections.abc import Iterable
from typing import Protocol

from relevo.v1 import state_pb2

from engine.load import BlockCounts, EngineLoad
from rpc.description import WorkerDescription


class HeartbeatLike(Protocol):
    """The pulse of an engine's thread."""

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of life; 0 when idle."""

    @property
    def waited_s(self) -> float:
        """Of that, how long it was ready to run while others had the cores."""

    @property
    def predicted_step_s(self) -> float:
        """What the running step was predicted to take."""


class LinkStatusLike(Protocol):
    """One KV link as its decode worker sees it."""

    @property
    def peer_id(self) -> str:
        """Worker at the other end."""

    @property
    def peer_incarnation(self) -> int:
        """Its process."""

    @property
    def state(self) -> str:
        """One of connecting, ready, broken, incompatible."""

    @property
    def generation(self) -> int:
        """Grows with each rebuild."""

    @property
    def backend(self) -> str:
        """What the bytes travel through."""

    @property
    def reason(self) -> str:
        """Why it is not ready, for people."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Measured; 0 while unknown."""

    @property
    def latency_s(self) -> float:
        """Round trip of a fetch beside the data."""

    @property
    def queued_bytes(self) -> int:
        """Bytes waiting to travel."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that came over it since this generation was made."""


def to_worker_load(  # noqa: PLR0913 - where each part is asked
    load: EngineLoad,
    *,
    description: WorkerDescription,
    state: str,
    num_transferring: int,
    num_promised_tokens: int = 0,
    heartbeat: HeartbeatLike,
    links: Iterable[LinkStatusLike] = (),
) -> state_pb2.WorkerLoad:
    """Return the message; the state feed adds the metric samples."""
    return state_pb2.WorkerLoad(
        state=state,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_transferring=num_transferring,
        num_promised_tokens=num_promised_tokens,
        num_waiting_uncached_tokens=load.num_waiting_uncached_tokens,
        num_computed_tokens=load.num_computed_tokens,
        blocks=to_block_counts(load.blocks),
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        step_s=load.step_s,
        request_s=load.request_s,
        kv_token_s=load.kv_token_s,
        rates_age_s=time.monotonic() - load.rates_learnt_at_s,
        heartbeat_age_s=heartbeat.age_s,
        predicted_step_s=heartbeat.predicted_step_s,
        links=[_link_status(link) for link in links],
        pid=description.pid,
        node_id=description.node_id,
    )


def to_block_counts(blocks: BlockCounts) -> state_pb2.BlockCounts:
    """Return the message for block counts."""
    return state_pb2.BlockCounts(
        free=blocks.free,
        cached=blocks.cached,
        used=blocks.used,
        held=blocks.held,
        quarantined=blocks.quarantined,
        total=blocks.total,
    )


def _link_status(link: LinkStatusLike) -> state_pb2.LinkStatus:
    return state_pb2.LinkStatus(
        peer_id=link.peer_id,
        peer_incarnation=link.peer_incarnation,
        state=link.state,
        generation=link.generation,
        backend=link.backend,
        reason=link.reason,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_s=link.latency_s,
        queued_bytes=link.queued_bytes,
        moved_bytes=link.moved_bytes,
    )
