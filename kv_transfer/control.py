"""What the KV plane says over the control plane, and the channels it is handed to say it.

The dataclasses mirror the messages of `prefill.proto` one to one; the workers translate. Nothing
here knows how a message travels. All channel methods are called on the worker's event loop.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.token_logprobs import TokenLogprobs
from kv_transfer.layout import KVLayout
from kv_transfer.link_end import LinkEnd
from kv_transfer.place import NOWHERE, Place


class ControlClosedError(Exception):
    """The control stream or call ended: the peer is gone or refused, or it was closed here."""


class StaleLinkError(Exception):
    """An OpenLink of an older generation or of another incarnation; nothing was changed."""


class TransferNotFoundError(Exception):
    """No transfer of this id appeared in time, or it was cancelled: there is nothing to follow."""


class FailureReason(StrEnum):
    """Why a transfer ended without its KV; the `reason` label of the failure counter."""

    LINK_BROKEN = "link_broken"
    TIMEOUT = "timeout"
    CONTROL_LOST = "control_lost"
    GONE = "gone"
    INVALID_COMMIT = "invalid_commit"
    DIGEST_MISMATCH = "digest_mismatch"
    NO_ROOM = "no_room"
    CANCELLED = "cancelled"


class TransferFailedError(Exception):
    """A hand-over that did not complete; the caller computes the prompt elsewhere or itself."""

    def __init__(self, reason: FailureReason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """A place in a pool and the process that holds it now."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """A prefill worker as an ingress describes it."""

    worker: WorkerRef
    address: str
    place: Place = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOpen:
    """First message of an OpenLink stream, decode to prefill."""

    decode_worker: WorkerRef
    generation: int
    layout: KVLayout
    end: LinkEnd
    prefill_incarnation: int


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One key and value of the rendezvous, either way."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class LinkAccepted:
    """The pair can link; build it with this backend, for this reason."""

    layout: KVLayout
    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkIncompatible:
    """The pair will never link; the reason is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkReady:
    """The sending side has built its end and finished the probe."""


@dataclass(frozen=True, slots=True)
class LinkAlive:
    """Said by the decode side again and again, and by the prefill side in answer: the stream and
    the process behind it still work.
    """


LinkMessage = LinkOpen | StoreEntry | LinkAccepted | LinkIncompatible | LinkReady | LinkAlive


class LinkControl(Protocol):
    """One end of one OpenLink stream."""

    async def send(self, message: LinkMessage) -> None:
        """Send one message; ControlClosedError when the stream has ended."""

    async def receive(self) -> LinkMessage:
        """Return the next message of the peer; ControlClosedError when the stream has ended."""

    async def close(self) -> None:
        """End the stream; idempotent. Both ends' `receive` then raise ControlClosedError."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The KV of tokens [0, num_tokens) is ready to be fetched; with 0 the first soon will be."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitChoice:
    """First token of one choice; `finish_reason` is empty unless this token ended it."""

    index: int = 0
    token_id: int
    finish_reason: str = ""
    logprobs: TokenLogprobs | None = None  # of the token, when they are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDigest:
    """Digest of the canonical bytes of tokens [token_start, token_end)."""

    token_start: int
    token_end: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The whole prompt is computed; only this lets decoding start."""

    num_tokens: int
    choices: tuple[CommitChoice, ...]
    digests: tuple[ChunkDigest, ...] = ()


TransferMessage = Offer | Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    """Asks for tokens [token_start, token_end) as operation number `ticket` of a link."""

    transfer_id: int
    epoch: int
    decode_worker: WorkerRef
    generation: int
    ticket: int
    token_start: int
    token_end: int
    with_digest: bool = False


class FetchVerdict(StrEnum):
    """Answer to a fetch; only GRANTED uses the ticket, and then both sides post the operation."""

    GRANTED = "granted"
    NOT_YET = "not_yet"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class FetchReply:
    """Verdict; and of a granted range its digest, when that was asked for."""

    verdict: FetchVerdict
    digest: bytes = b""
    # over shared memory: the sender's blocks that hold the range, to be read until given back
    lent: tuple[int, ...] = ()


class TransferControl(Protocol):
    """The decode side's calls to one prefill worker."""

    def watch(
        self, transfer_id: int, *, epoch: int, decode_worker: WorkerRef
    ) -> AsyncIterator[TransferMessage]:
        """Open the Transfer stream, an async generator; opening it renews the lease.

        Raises ControlClosedError when it breaks, TransferNotFoundError when the peer knows no such
        transfer.
        """

    async def fetch(self, order: FetchOrder) -> FetchReply:
        """Unary Fetch; any exception but cancellation means that the outcome is unknown."""

    async def release(self, transfer_id: int, *, epoch: int) -> None:
        """Unary Release; any exception but cancellation means that it may not have arrived.

        Repeating it changes nothing.
        """
