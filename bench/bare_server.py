"""Servers that do nothing with a token but write it: what is under a face in `bench.faces`.

    .venv/bin/python -m bench.bare_server --step-s S

The same uvicorn and the same grpc.aio, the same bytes for a token, made once.
"""

import argparse
import asyncio
from typing import Any

import grpc
import grpc.aio
import orjson
import uvloop
from relevo.v1 import inference_pb2
from starlette.types import Receive, Scope, Send

from api import sse
from api.config import IngressConfig
from api.http_server import HttpServer
from bench.face_server import MODEL_ID, tell_cpu_s

REQUEST_ID = "0" * 32
EVENT = sse.event(
    {
        "id": f"cmpl-{REQUEST_ID}",
        "object": "text_completion",
        "created": 1_764_500_000,
        "model": MODEL_ID,
        "choices": [{"index": 0, "text": " fox", "logprobs": None, "finish_reason": None}],
    }
)
MESSAGE = inference_pb2.GenerateStreamResponse(
    request_id=REQUEST_ID, model=MODEL_ID, text=" fox", token_ids=[23_456]
).SerializeToString()
SERVICE = "relevo.v1.InferenceService"


class BareServer:
    """Both protocols, a token a step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def serve(self) -> None:
        """Run until stdin ends."""
        http = HttpServer(self, IngressConfig(http_port=0, grpc_port=0))
        handlers: dict[str, Any] = {
            "GenerateStream": grpc.unary_stream_rpc_method_handler(self._generate)
        }
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        grpc_port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await tell_cpu_s(await http.start(), grpc_port)
        await asyncio.gather(http.stop(), server.stop(0.0))

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer over HTTP, whatever is asked for."""
        body = (await receive())["body"]
        headers = [(b"content-type", sse.CONTENT_TYPE)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(orjson.loads(body)["max_tokens"]):
            await asyncio.sleep(self._step_s)
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _generate(self, data: bytes, context: Any) -> None:
        request = inference_pb2.GenerateStreamRequest.FromString(data)
        for _ in range(request.generation.max_tokens):
            await asyncio.sleep(self._step_s)
            await context.write(MESSAGE)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-s", type=float, default=0.02)
    uvloop.run(BareServer(parser.parse_args().step_s).serve())


if __name__ == "__main__":
    main()
