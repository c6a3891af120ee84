"""The prefill side of an OpenLink stream, as the KV plane wants to see it."""

import dataclasses

import grpc
from relevo.v1 import common_pb2, prefill_pb2

from kv_transfer.control import (
    ControlClosedError,
    LinkAccepted,
    LinkAlive,
    LinkIncompatible,
    LinkMessage,
    LinkOpen,
    LinkReady,
    StoreEntry,
    WorkerRef,
)
from kv_transfer.layout import KVLayout
from kv_transfer.link_end import LinkEnd
from rpc.duplex import Duplex
from rpc.mirror import from_message, to_message
from workers.link_channel import LinkChannel

OpenLinkContext = grpc.aio.ServicerContext[
    prefill_pb2.OpenLinkRequest, prefill_pb2.OpenLinkResponse
]


class AcceptedLinkChannel(LinkChannel[prefill_pb2.OpenLinkRequest, prefill_pb2.OpenLinkResponse]):
    """The stream a decode worker opened here; its call returns once nobody serves it."""

    def __init__(self, context: OpenLinkContext) -> None:
        super().__init__(
            Duplex(context.read, context.write),
            peer="decode worker",
            encode=_to_response,
            decode=_from_request,
        )


def _to_response(message: LinkMessage) -> prefill_pb2.OpenLinkResponse:
    response = prefill_pb2.OpenLinkResponse
    match message:
        case StoreEntry(key, value):
            return response(store_entry=prefill_pb2.StoreEntry(key=key, value=value))
        case LinkAccepted(layout, backend, reason):
            return response(
                accepted=response.Accepted(
                    layout=to_message(common_pb2.KVLayout, layout), backend=backend, reason=reason
                )
            )
        case LinkIncompatible(reason):
            return response(incompatible=response.Incompatible(reason=reason))
        case LinkReady():
            return response(ready=response.Ready())
        case LinkAlive():
            return response(alive=response.Alive())
        case LinkOpen():
            raise AssertionError("only the decode side opens a link")


def _from_request(request: prefill_pb2.OpenLinkRequest) -> LinkMessage:
    match request.WhichOneof("message"):
        case "store_entry":
            return StoreEntry(request.store_entry.key, request.store_entry.value)
        case "open":
            opened = request.open
            return LinkOpen(
                decode_worker=from_message(WorkerRef, opened.decode_worker),
                generation=opened.generation,
                layout=_layout_of(opened.layout),
                end=from_message(LinkEnd, opened.end),
                prefill_incarnation=opened.prefill_incarnation,
            )
        case "alive":
            return LinkAlive()
        case _:
            raise ControlClosedError("the decode worker sent an empty message")


def _layout_of(message: common_pb2.KVLayout) -> KVLayout:
    try:
        return from_message(KVLayout, message)
    except ValueError as error:
        raise ControlClosedError(f"the decode worker's layout makes no sense: {error}") from error


assert {field.name for field in dataclasses.fields(LinkEnd)} == set(
    prefill_pb2.LinkEnd.DESCRIPTOR.fields_by_name
), "LinkEnd and its message must have the same fields"

assert {field.name for field in dataclasses.fields(KVLayout)} == set(
    common_pb2.KVLayout.DESCRIPTOR.fields_by_name
), "KVLayout and its message must have the same fields"
