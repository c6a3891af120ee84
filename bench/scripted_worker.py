"""A decode worker without an engine: what remains of a token's way is the ingress's own.

    .venv/bin/python -m bench.scripted_worker TOKEN_FILE STEP_S TOKEN_ID...

All its requests get one of the tokens at each tick, as from an engine's step. Prints its
description as JSON and serves until stdin ends.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from relevo.v1 import common_pb2, decode_pb2, decode_pb2_grpc, state_pb2, state_pb2_grpc

from rpc.config import RpcConfig
from rpc.description import WorkerDescription, process_incarnation
from rpc.server import WorkerServer
from rpc.token import read_token

NUM_BLOCKS = 100_000
State = state_pb2.WatchStateResponse
Response = decode_pb2.DecodeResponse


class ScriptedDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Decode alone; there is nobody to link to."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._tick = asyncio.Event()

    async def run(self, step_s: float) -> None:
        """Tick for ever."""
        while True:
            await asyncio.sleep(step_s)
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    async def SetPeers(self, request: Any, context: Any) -> decode_pb2.SetPeersResponse:  # noqa: ARG002, N802
        """Take note of nobody."""
        return decode_pb2.SetPeersResponse()

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Response]:  # noqa: ARG002, N802
        """One token at each tick."""
        start, num_tokens = len(request.request.token_ids), self._num_tokens(request)
        yield Response(admitted=Response.Admitted())
        for offset in range(num_tokens):
            await self._tick.wait()
            tokens = common_pb2.Tokens(
                start_position=start + offset,
                token_ids=[self._token_ids[offset % len(self._token_ids)]],
            )
            if offset + 1 == num_tokens:
                tokens.finish_reason = common_pb2.FINISH_REASON_LENGTH
            yield Response(tokens=tokens)

    @staticmethod
    def _num_tokens(request: decode_pb2.DecodeRequest) -> int:
        return request.request.sampling_params.max_tokens


class ScriptedState(state_pb2_grpc.WorkerServiceServicer):
    """Says once a second that all is well."""

    def __init__(self, worker: common_pb2.WorkerRef, model_id: str) -> None:
        self._hello = State.Hello(
            worker=worker,
            layout=common_pb2.KVLayout(model_id=model_id, dtype="float32", block_size=32),
            pool="decode",
            max_num_seqs=256,
            max_model_len=131_072,
            num_kv_blocks=NUM_BLOCKS,
            hash_root=bytes(32),
            max_num_batched_tokens=2048,
            kv_bytes_per_token=1000,
        )

    async def WatchState(self, request: Any, context: Any) -> AsyncIterator[State]:  # noqa: ARG002, N802
        """Snapshot, then load."""
        yield State(hello=self._hello, sequence=0)
        yield State(snapshot_chunk=State.SnapshotChunk(last=True), sequence=1)
        load = state_pb2.WorkerLoad(
            state="ready",
            prefill_tokens_per_s=100_000.0,
            step_s=0.001,
            blocks=state_pb2.BlockCounts(free=NUM_BLOCKS, total=NUM_BLOCKS),
        )
        sequence = 2
        while True:
            yield State(load=load, sequence=sequence)
            sequence += 1
            await asyncio.sleep(1.0)


async def serve(token_file: Path, step_s: float, token_ids: Sequence[int]) -> None:
    """Serve until stdin ends."""
    worker = common_pb2.WorkerRef(worker_id="decode-0", incarnation=process_incarnation())
    decode = ScriptedDecode(token_ids)
    server = WorkerServer(bind_host="127.0.0.1", config=RpcConfig(), token=read_token(token_file))

    def add(grpc_server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, grpc_server)  # type: ignore[no-untyped-call]
        state = ScriptedState(worker, "scripted")
        state_pb2_grpc.add_WorkerServiceServicer_to_server(state, grpc_server)  # type: ignore[no-untyped-call]

    description = WorkerDescription(
        worker_id=worker.worker_id,
        pool="decode",
        incarnation=worker.incarnation,
        address=await server.start(add),
        node_id="node",
        pid=os.getpid(),
    )
    print(json.dumps(description.to_dict()), flush=True)
    ticking = asyncio.create_task(decode.run(step_s))
    await asyncio.to_thread(sys.stdin.read)
    ticking.cancel()
    await server.stop(0)


def main() -> None:
    """Serve with what the command line says."""
    token_file, step_s, *token_ids = sys.argv[1:]
    asyncio.run(serve(Path(token_file), float(step_s), [int(each) for each in token_ids]))


if __name__ == "__main__":
    main()
