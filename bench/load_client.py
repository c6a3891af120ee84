"""What the load client itself costs: processor time for each streamed token, beside httpx.

    .venv/bin/python -m bench.load_client [--tokens 200] [--streams 16] [--model PATH]

The server is the ingress over a scripted router, in a process of its own (`bench.face_server`). A
client that shares the machine with what it measures must be a small part of it.
"""

import argparse
import asyncio
import time

import orjson
import uvloop

from bench.face_server import MODEL_ID, FaceServer, started
from load_generator.client import Client
from load_generator.planned_request import PlannedRequest
from load_generator.run import Sender

ROUNDS = 3


async def of_ours(url: str, num_streams: int, num_tokens: int) -> float:
    """Microseconds for each token of so many streams at once."""
    body = {"model": MODEL_ID, "prompt": "hi", "max_tokens": num_tokens, "stream": True}
    request = PlannedRequest(
        due_s=0.0,
        body=orjson.dumps({**body, "stream_options": {"include_usage": True}}),
        num_prompt_tokens=1,
        num_output_tokens=num_tokens,
    )
    async with Client(url) as client:
        run = await Sender(client).send([request] * num_streams)
    assert not any(outcome.has_failed for outcome in run.outcomes)
    num_received = sum(outcome.num_output_tokens for outcome in run.outcomes)
    assert num_received == num_streams * num_tokens
    return 1e6 * run.client_cpu_s / num_received


async def of_httpx(server: FaceServer, num_streams: int, num_tokens: int) -> float:
    """The same bytes through httpx, neither parsed nor kept."""
    cpu_s = time.process_time()
    await asyncio.gather(*(server.stream_http(num_tokens) for _ in range(num_streams)))
    return 1e6 * (time.process_time() - cpu_s) / (num_streams * num_tokens)


async def measure(model: str, num_streams: int, num_tokens: int) -> None:
    """Print both, in turn."""
    async with started(("--model", model)) as server:
        url = str(server.http.base_url)
        for _ in range(ROUNDS):
            ours = await of_ours(url, num_streams, num_tokens)
            other = await of_httpx(server, num_streams, num_tokens)
            print(f"ours {ours:5.1f} us a token, httpx {other:5.1f}, ratio {ours / other:.2f}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--model", default=".models/smollm2-135m-instruct")
    options = parser.parse_args()
    uvloop.run(measure(options.model, options.streams, options.tokens))


if __name__ == "__main__":
    main()
