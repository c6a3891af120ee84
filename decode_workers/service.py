"""DecodeService: messages in, the worker's verbs, messages out."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from relevo.v1 import common_pb2, decode_pb2, decode_pb2_grpc

from decode_workers.decoding import Admitted, Arrived, DecodeOrder, Decoding
from engine.admission import MAX_CHOICES
from engine.request import RequestOutput
from grammar.library import GrammarLibrary
from kv_transfer.control import PeerInfo, WorkerRef
from kv_transfer.link_dialer import LinkDialer
from kv_transfer.place import Place
from rpc import engine_request
from rpc.errors import InvalidRequestError
from rpc.grammar_message import attach_grammar
from rpc.mirror import from_message

MAX_TIMEOUT_S = 600.0  # of a call without a deadline

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """The gRPC face of a decode worker; holds no state of its own."""

    def __init__(self, *, decoding: Decoding, dialer: LinkDialer, grammars: GrammarLibrary) -> None:
        self._decoding = decoding
        self._grammars = grammars
        self._dialer = dialer

    async def SetPeers(  # noqa: N802
        self,
        request: decode_pb2.SetPeersRequest,
        context: Context,  # noqa: ARG002
    ) -> decode_pb2.SetPeersResponse:
        """Link to the prefill workers one ingress knows."""
        peers = [
            PeerInfo(
                worker=from_message(WorkerRef, peer.worker),
                address=peer.address,
                place=Place(peer.node_id, peer.zone),
            )
            for peer in request.prefill_workers
        ]
        try:
            self._dialer.set_peers(request.ingress_id, peers)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        return decode_pb2.SetPeersResponse()

    async def Decode(  # noqa: N802
        self,
        request: decode_pb2.DecodeRequest,
        context: Context,
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """Decode one request."""
        left_s = context.time_remaining()
        prefill_worker = None
        if request.HasField("prefill_worker"):
            prefill_worker = from_message(WorkerRef, request.prefill_worker)
        params = request.request.sampling_params
        own = engine_request.from_proto(request.request)
        await attach_grammar(own, params, self._grammars)
        order = DecodeOrder(
            request=own,
            transfer_id=request.transfer_id,
            epoch=request.epoch,
            prefill_worker=prefill_worker,
            decode_incarnation=request.decode_incarnation,
            timeout_s=MAX_TIMEOUT_S if left_s is None else min(left_s, MAX_TIMEOUT_S),
        )
        arrived: Arrived | None = None
        told: set[int] = set()  # choices of which something was said
        async with aclosing(self._decoding.decode(order)) as messages:
            async for message in messages:
                if isinstance(message, Admitted):
                    yield decode_pb2.DecodeResponse(admitted=decode_pb2.DecodeResponse.Admitted())
                elif isinstance(message, Arrived):
                    arrived = message
                else:
                    is_first = message.choice_index not in told
                    told.add(message.choice_index)
                    yield _to_response(message, arrived, is_first=is_first)

    async def CancelChoices(  # noqa: N802
        self,
        request: decode_pb2.CancelChoicesRequest,
        context: Context,  # noqa: ARG002
    ) -> decode_pb2.CancelChoicesResponse:
        """End some choices of a request."""
        self._decoding.cancel_choices(
            request.transfer_id, request.epoch, request.choice_indexes[:MAX_CHOICES]
        )
        return decode_pb2.CancelChoicesResponse()


def _to_response(
    output: RequestOutput, arrived: Arrived | None, *, is_first: bool
) -> decode_pb2.DecodeResponse:
    response = decode_pb2.DecodeResponse(tokens=engine_request.output_to_tokens(output))
    if not is_first and output.timings is None and output.finish_reason is None:
        return response
    response.num_cached_tokens = output.num_cached_tokens
    if output.timings is not None:
        response.timings.CopyFrom(engine_request.timings_to_proto(output.timings))
    if arrived is not None:
        response.num_cached_tokens = arrived.num_cached_tokens
        response.kv_transfer_bytes = arrived.num_bytes
        response.timings.MergeFrom(
            common_pb2.WorkerTimings(
                transfer_tail_s=arrived.tail_s, kv_transfer_s=arrived.transfer_s
            )
        )
    return response
