"""What a link needs of its backend: a channel of two ends that moves bytes and breaks."""

from typing import Protocol

import torch


class LinkBrokenError(Exception):
    """The link is gone: the peer died, an operation failed, or it was aborted."""


class LinkTimeoutError(LinkBrokenError):
    """An operation did not end in time; the peer is frozen or far too slow. The link is gone."""


class Operation(Protocol):
    """One posted send or receive; its tensor belongs to it until `wait` returned or raised."""

    def wait(self, timeout_s: float) -> None:
        """Block until the bytes are out or in; LinkTimeoutError, LinkBrokenError."""


class Channel(Protocol):
    """What joins the two processes of a link. All but `abort` run on the link's own thread."""

    def abort(self) -> None:
        """Make every posted and later operation raise; any thread; may block, never for ever."""

    def close(self) -> None:
        """Free sockets and memory; nothing is posted any more."""


class MessageChannel(Channel, Protocol):
    """A built process group of two ranks."""

    def send(self, tensor: torch.Tensor) -> Operation:
        """Post a contiguous tensor."""

    def receive(self, tensor: torch.Tensor) -> Operation:
        """Post a buffer."""
