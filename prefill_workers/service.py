"""PrefillService: messages in, the KV plane's and the engine's verbs, messages out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from relevo.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

from engine.request import FinishReason, RequestOutput, RequestTimings
from grammar.library import GrammarLibrary
from kv_transfer.control import (
    Commit,
    CommitChoice,
    ControlClosedError,
    FetchOrder,
    FetchVerdict,
    LinkOpen,
    StaleLinkError,
    TransferMessage,
    TransferNotFoundError,
    WorkerRef,
)
from kv_transfer.link_acceptor import LinkAcceptor
from kv_transfer.sender import KVSender
from prefill_workers.hand_over import HandOver, PrefillOrder
from prefill_workers.link_channel import AcceptedLinkChannel, OpenLinkContext
from rpc import engine_request
from rpc.errors import InvalidRequestError, StaleWorkerError, UnknownTransferError
from rpc.grammar_message import attach_grammar
from rpc.logprobs import logprobs_to_proto
from rpc.mirror import from_message, to_message

MAX_HOLD_S = 600.0

_VERDICTS = {
    FetchVerdict.GRANTED: prefill_pb2.FETCH_VERDICT_GRANTED,
    FetchVerdict.NOT_YET: prefill_pb2.FETCH_VERDICT_NOT_YET,
    FetchVerdict.GONE: prefill_pb2.FETCH_VERDICT_GONE,
}

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """The gRPC face of a prefill worker; holds no state of its own."""

    def __init__(
        self,
        *,
        hand_over: HandOver,
        sender: KVSender,
        acceptor: LinkAcceptor,
        grammars: GrammarLibrary,
    ) -> None:
        self._hand_over = hand_over
        self._grammars = grammars
        self._sender = sender
        self._acceptor = acceptor

    async def OpenLink(  # noqa: N802
        self,
        request_iterator: AsyncIterator[prefill_pb2.OpenLinkRequest],  # noqa: ARG002
        context: OpenLinkContext,
    ) -> None:
        """Keep one link for as long as its stream."""
        channel = AcceptedLinkChannel(context)
        try:
            opened = await channel.receive()
            if not isinstance(opened, LinkOpen):
                raise InvalidRequestError("expected the stream to start with its Open message")
            await self._serve_link(opened, channel)
        except StaleLinkError as error:
            raise StaleWorkerError(str(error)) from error
        except ControlClosedError:
            return
        finally:
            await channel.close()

    async def _serve_link(self, opened: LinkOpen, channel: AcceptedLinkChannel) -> None:
        serving = asyncio.ensure_future(self._acceptor.serve(opened, channel))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            # The link must come to its own end: a process group cannot be dropped half way.
            await channel.close()
            await asyncio.gather(serving, return_exceptions=True)
            raise

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Compute one prompt."""
        left_s = context.time_remaining()
        params = request.request.sampling_params
        own = engine_request.from_proto(request.request, hand_over=True)
        await attach_grammar(own, params, self._grammars)
        order = PrefillOrder(
            request=own,
            transfer_id=request.transfer_id,
            epoch=request.epoch,
            decode_worker=from_message(WorkerRef, request.decode_worker),
            prefill_incarnation=request.prefill_incarnation,
            hold_s=MAX_HOLD_S if left_s is None else min(left_s, MAX_HOLD_S),
        )
        first_choice = order.request.choice_index
        async with aclosing(self._hand_over.prefill(order)) as outputs:
            async for output in outputs:
                # Before the tokens too: a short prompt has no other message of its cached tokens.
                if output.choice_index == first_choice:
                    yield _to_progress(output)
                if output.token_ids or output.finish_reason or output.prompt_logprobs:
                    yield _to_prefill_tokens(output)

    async def Transfer(  # noqa: N802
        self,
        request: prefill_pb2.TransferRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[prefill_pb2.TransferResponse]:
        """Tell the decode worker what it may fetch."""
        watching = self._sender.watch(
            request.transfer_id,
            epoch=request.epoch,
            decode_worker=from_message(WorkerRef, request.decode_worker),
        )
        try:
            async with aclosing(watching) as messages:
                async for message in messages:
                    self._hand_over.follow(request.transfer_id)
                    yield _to_transfer_response(message)
        except TransferNotFoundError as error:
            raise UnknownTransferError(str(error)) from error

    async def Fetch(  # noqa: N802
        self,
        request: prefill_pb2.FetchRequest,
        context: Context,  # noqa: ARG002
    ) -> prefill_pb2.FetchResponse:
        """Grant one range, or say why not."""
        order = FetchOrder(
            transfer_id=request.transfer_id,
            epoch=request.epoch,
            decode_worker=from_message(WorkerRef, request.decode_worker),
            generation=request.generation,
            ticket=request.ticket,
            token_start=request.token_start,
            token_end=request.token_end,
            with_digest=request.with_digest,
        )
        try:
            reply = await self._sender.fetch(order)
        except StaleLinkError as error:
            raise StaleWorkerError(str(error)) from error
        return prefill_pb2.FetchResponse(
            verdict=_VERDICTS[reply.verdict], digest=reply.digest, lent_block_ids=reply.lent
        )

    async def Release(  # noqa: N802
        self,
        request: prefill_pb2.ReleaseRequest,
        context: Context,  # noqa: ARG002
    ) -> prefill_pb2.ReleaseResponse:
        """Give the blocks of a transfer back."""
        self._sender.release(request.transfer_id, epoch=request.epoch)
        return prefill_pb2.ReleaseResponse()


def _to_progress(output: RequestOutput) -> prefill_pb2.PrefillResponse:
    response = prefill_pb2.PrefillResponse
    return response(
        progress=response.Progress(
            num_computed_tokens=output.num_computed_tokens,
            num_cached_tokens=output.num_cached_tokens,
        )
    )


def _to_prefill_tokens(output: RequestOutput) -> prefill_pb2.PrefillResponse:
    response = prefill_pb2.PrefillResponse(tokens=engine_request.output_to_tokens(output))
    if output.token_ids or output.finish_reason is not None:
        timings = output.timings or RequestTimings()
        response.timings.CopyFrom(engine_request.timings_to_proto(timings))
    return response


def _to_transfer_response(message: TransferMessage) -> prefill_pb2.TransferResponse:
    response = prefill_pb2.TransferResponse
    if not isinstance(message, Commit):
        return response(offer=response.Offer(num_tokens=message.num_tokens))
    choices = [_to_choice(choice, position=message.num_tokens) for choice in message.choices]
    digests = [to_message(prefill_pb2.ChunkDigest, each) for each in message.digests]
    return response(
        commit=response.Commit(num_tokens=message.num_tokens, choices=choices, digests=digests)
    )


def _to_choice(choice: CommitChoice, *, position: int) -> prefill_pb2.TransferResponse.Choice:
    message = prefill_pb2.TransferResponse.Choice(
        index=choice.index,
        token_id=choice.token_id,
        finish_reason=_finish_reason_number(choice.finish_reason),
    )
    if choice.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_proto(position, [choice.logprobs]))
    return message


def _finish_reason_number(finish_reason: str) -> common_pb2.FinishReason:
    reason = FinishReason(finish_reason) if finish_reason else None
    return engine_request.finish_reason_to_proto(reason)
