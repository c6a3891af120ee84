"""The decode side of an OpenLink stream, as the KV plane wants to see it."""

import grpc
from relevo.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

from kv_transfer.control import (
    ControlClosedError,
    LinkAccepted,
    LinkAlive,
    LinkIncompatible,
    LinkMessage,
    LinkOpen,
    LinkReady,
    StoreEntry,
)
from kv_transfer.layout import KVLayout
from rpc.duplex import Duplex
from rpc.mirror import from_message, to_message
from workers.link_channel import LinkChannel


class DialedLinkChannel(LinkChannel[prefill_pb2.OpenLinkResponse, prefill_pb2.OpenLinkRequest]):
    """An OpenLink stream that this process opens."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.OpenLink()
        super().__init__(
            Duplex(call.read, call.write, on_close=call.cancel),
            peer="prefill worker",
            encode=_to_request,
            decode=_from_response,
        )


def _to_request(message: LinkMessage) -> prefill_pb2.OpenLinkRequest:
    request = prefill_pb2.OpenLinkRequest
    match message:
        case StoreEntry(key, value):
            return request(store_entry=prefill_pb2.StoreEntry(key=key, value=value))
        case LinkOpen():
            return request(
                open=request.Open(
                    decode_worker=to_message(common_pb2.WorkerRef, message.decode_worker),
                    generation=message.generation,
                    layout=to_message(common_pb2.KVLayout, message.layout),
                    end=to_message(prefill_pb2.LinkEnd, message.end),
                    prefill_incarnation=message.prefill_incarnation,
                )
            )
        case LinkAlive():
            return request(alive=request.Alive())
        case _:
            raise AssertionError(f"a decode worker never sends {type(message).__name__}")


def _from_response(response: prefill_pb2.OpenLinkResponse) -> LinkMessage:
    match response.WhichOneof("message"):
        case "store_entry":
            return StoreEntry(response.store_entry.key, response.store_entry.value)
        case "accepted":
            accepted = response.accepted
            try:
                layout = from_message(KVLayout, accepted.layout)
                return LinkAccepted(layout, accepted.backend, accepted.reason)
            except ValueError as error:
                raise ControlClosedError(f"the peer's layout makes no sense: {error}") from error
        case "incompatible":
            return LinkIncompatible(response.incompatible.reason)
        case "ready":
            return LinkReady()
        case "alive":
            return LinkAlive()
        case _:
            raise ControlClosedError("the prefill worker sent an empty message")
