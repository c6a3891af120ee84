"""One end of an OpenLink stream, as the KV plane wants to see it."""

from collections.abc import Callable
from typing import Generic, TypeVar

from kv_transfer.control import ControlClosedError, LinkMessage
from rpc.duplex import Duplex, StreamClosedError

ReceivedT = TypeVar("ReceivedT")
SentT = TypeVar("SentT")


class LinkChannel(Generic[ReceivedT, SentT]):
    """A `LinkControl` over a stream; each kind of worker knows the messages of its own end."""

    def __init__(
        self,
        duplex: Duplex[ReceivedT, SentT],
        *,
        peer: str,  # as errors name it
        encode: Callable[[LinkMessage], SentT],
        decode: Callable[[ReceivedT], LinkMessage],  # ControlClosedError for what makes no sense
    ) -> None:
        self._duplex = duplex
        self._peer = peer
        self._encode = encode
        self._decode = decode

    async def send(self, message: LinkMessage) -> None:
        """Send one message; ControlClosedError when the stream has ended."""
        try:
            await self._duplex.send(self._encode(message))
        except StreamClosedError as error:
            raise self._closed() from error

    async def receive(self) -> LinkMessage:
        """Return the peer's next message; ControlClosedError at the end."""
        try:
            return self._decode(await self._duplex.receive())
        except StreamClosedError as error:
            raise self._closed() from error

    async def close(self) -> None:
        """End the stream, and with it the call that carries it."""
        await self._duplex.close()

    def _closed(self) -> ControlClosedError:
        return ControlClosedError(f"the {self._peer} ended the link's stream")
