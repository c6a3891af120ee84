"""What a hand-over costs beside its bytes, and when its chunks travel.

    .venv/bin/python -m bench.hand_over [--rounds 7] [--short-rounds 40] [--model PATH]
        [--dtype float32] [--backend gloo] [--prompt 1000] [--long 2000] [--one-process]

A prefill and a decode worker as processes of their own, over loopback gRPC and a link, as the
router drives them. Prints the time from COMMIT to the last byte of a one-block prompt against a
unary gRPC call made in turns with it; the time to the first token of a cold prompt against the
prefill worker's own prefill time, and how long its threads were kept from the cores meanwhile; and
first to second token against a decode step.

With `--one-process` both workers run in this one, for the spans: it prints, too, which ranges had
arrived when the prefill of a long prompt ended. What else it prints then holds for one interpreter
that five threads share.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from relevo.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from bench.core_time import CoreTime
from bench.worker_processes import WorkerProcesses
from decode_workers.worker import DecodeWorker
from prefill_workers.worker import PrefillWorker
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.description import WorkerDescription
from rpc.token import create_token, read_token
from telemetry import attributes
from workers.config import WorkerConfig

_INCARNATION = 1
_TIMEOUT_S = 120.0


def _untyped(stub: Any) -> Any:
    # what grpc generates has no types
    return stub


@dataclass(slots=True)
class Times:
    """One request, in seconds from its start."""

    first_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    tail_s: float = 0.0


class Pair:
    """Two workers and the calls a router makes to them."""

    def __init__(
        self, channels: ChannelPool, prefill: WorkerDescription, decode: WorkerDescription
    ) -> None:
        self.prefill, self.decode = prefill, decode
        to_prefill, to_decode = channels.get(prefill.address), channels.get(decode.address)
        self.prefill_stub: Any = _untyped(prefill_pb2_grpc.PrefillServiceStub)(to_prefill)
        self.decode_stub: Any = _untyped(decode_pb2_grpc.DecodeServiceStub)(to_decode)
        self.health_stub: Any = _untyped(health_pb2_grpc.HealthStub)(to_prefill)
        self._ids = itertools.count(1)

    async def link(self) -> None:
        """Let the decode worker dial, until a request goes through."""
        peers = decode_pb2.SetPeersRequest(
            ingress_id="bench", prefill_workers=[self.prefill.to_peer()]
        )
        for _ in range(100):
            await self.decode_stub.SetPeers(peers)
            try:
                await self.run([1, 2, 3], max_tokens=2)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
            else:
                return
        raise RuntimeError("the workers did not link")

    async def unary_s(self) -> float:
        """One unary call to the prefill worker."""
        started = time.perf_counter()
        await self.health_stub.Check(health_pb2.HealthCheckRequest())
        return time.perf_counter() - started

    async def run(self, prompt: list[int], *, max_tokens: int) -> Times:
        """Run one request over the pair, both streams at once."""
        number = next(self._ids)
        request = common_pb2.EngineRequest(
            request_id=f"bench-{number}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling_params=common_pb2.SamplingParams(
                temperature=0.0, top_p=1.0, max_tokens=max_tokens, ignore_eos=True
            ),
        )
        times, started = Times(), time.perf_counter()
        decoding = self.decode_stub.Decode(
            decode_pb2.DecodeRequest(
                request=request,
                transfer_id=number,
                epoch=1,
                decode_incarnation=self.decode.incarnation,
                prefill_worker=self.prefill.to_ref(),
            ),
            timeout=_TIMEOUT_S,
        )
        prefilling = self.prefill_stub.Prefill(
            prefill_pb2.PrefillRequest(
                request=request,
                transfer_id=number,
                epoch=1,
                decode_worker=self.decode.to_ref(),
                prefill_incarnation=self.prefill.incarnation,
            ),
            timeout=_TIMEOUT_S,
        )
        await asyncio.gather(
            self._read_prefill(prefilling, times, started),
            self._read_decode(decoding, times, started),
        )
        return times

    async def _read_prefill(self, call: Any, times: Times, started: float) -> None:
        async for response in call:
            if response.HasField("tokens"):
                times.first_s = time.perf_counter() - started
                times.prefill_s = response.timings.prefill_s

    async def _read_decode(self, call: Any, times: Times, started: float) -> None:
        async for response in call:
            if response.HasField("tokens"):
                times.tokens_s.append(time.perf_counter() - started)
                times.tail_s = max(times.tail_s, response.timings.transfer_tail_s)


@asynccontextmanager
async def linked_pair(
    token_file: Path, prefill: WorkerDescription, decode: WorkerDescription
) -> AsyncIterator[Pair]:
    """Two workers that serve, once a request goes through."""
    channels = ChannelPool(token=read_token(token_file), config=RpcConfig())
    try:
        pair = Pair(channels, prefill, decode)
        await pair.link()
        yield pair
    finally:
        await channels.close()


@asynccontextmanager
async def pair_here(folder: Path, settings: dict[str, Any]) -> AsyncIterator[Pair]:
    """Both workers in this process."""
    token_file = folder / "token"
    create_token(token_file)
    settings = {**settings, "token_file": str(token_file)}
    prefill = PrefillWorker(
        WorkerConfig.from_dict(settings), worker_id="prefill-0", incarnation=_INCARNATION
    )
    decode = DecodeWorker(
        WorkerConfig.from_dict(settings), worker_id="decode-0", incarnation=_INCARNATION
    )
    try:
        descriptions = await prefill.start(), await decode.start()
        async with linked_pair(token_file, *descriptions) as pair:
            yield pair
    finally:
        await decode.stop()
        await prefill.stop()


@asynccontextmanager
async def pair_of_processes(folder: Path, settings: dict[str, Any]) -> AsyncIterator[Pair]:
    """Each worker in its own."""
    with WorkerProcesses(folder, settings) as workers:
        descriptions = workers.start("prefill"), workers.start("decode")
        async with linked_pair(workers.token_file, *descriptions) as pair:
            yield pair


async def measure(pair: Pair, options: argparse.Namespace) -> None:
    """Print the three costs."""
    generator = torch.Generator().manual_seed(7)

    def prompt(num_tokens: int) -> list[int]:
        return torch.randint(100, 40_000, (num_tokens,), generator=generator).tolist()

    unary, tails = [], []
    for _ in range(options.short_rounds):
        unary.append(await pair.unary_s())
        tails.append((await pair.run(prompt(32), max_tokens=3)).tail_s)
    ratio = statistics.median(tails) / statistics.median(unary)
    print(
        f"one block: COMMIT to arrival {statistics.median(tails) * 1e3:.2f} ms, unary call"
        f" {statistics.median(unary) * 1e3:.2f} ms, ratio {ratio:.2f}"
        f"  (10%..90% of the tail: {_spread(tails)} ms)",
        flush=True,
    )
    round_trip_s = statistics.median(unary)
    for _ in range(options.rounds):
        before = CoreTime.of([pair.prefill.pid])
        times = await pair.run(prompt(options.prompt), max_tokens=12)
        step_s = (times.tokens_s[-1] - times.tokens_s[1]) / (len(times.tokens_s) - 2)
        over_s = times.first_s - (1.05 * times.prefill_s + 2 * round_trip_s)
        num_steps = (times.tokens_s[1] - times.first_s) / step_s
        wait_s = CoreTime.of([pair.prefill.pid]).since(before).wait_s
        print(
            f"cold {options.prompt} tokens: first token {times.first_s:.3f} s, prefill"
            f" {times.prefill_s:.3f} s ({wait_s:.1f} s without a core), over the limit by"
            f" {over_s * 1e3:+.1f} ms; first to second token {num_steps:.2f} decode steps",
            flush=True,
        )
    if options.one_process:
        await pair.run(prompt(options.long), max_tokens=2)


def _spread(values: list[float]) -> str:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{low * 1e3:.2f}..{high * 1e3:.2f}"


def print_timeline(exporter: InMemorySpanExporter) -> None:
    """Print when the ranges of the last request arrived, from its spans."""
    spans = exporter.get_finished_spans()
    prefill = [each for each in spans if each.name == attributes.SPAN_PREFILL][-1]
    received = [each for each in spans if each.name == attributes.SPAN_KV_RECEIVE][-1]
    ranges = [
        each
        for each in spans
        if each.name == attributes.SPAN_KV_RANGE
        and each.parent
        and each.parent.span_id == received.context.span_id
    ]
    print("timeline of the long prompt, ms before (-) or after (+) its prefill ended:")
    for each in ranges:
        facts = each.attributes or {}
        start, end = (
            int(str(facts[name]))
            for name in (attributes.RELEVO_KV_TOKEN_START, attributes.RELEVO_KV_TOKEN_END)
        )
        late_ms = ((each.end_time or 0) - (prefill.end_time or 0)) / 1e6
        print(f"  tokens {start:>5} to {end:>5}  arrived {late_ms:+9.1f}")


def main() -> None:
    """Run and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short-rounds", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--long", type=int, default=2000)
    parser.add_argument("--model", type=Path, default=Path(".models/smollm2-135m-instruct"))
    # float32 computes a prompt five times as fast on most CPUs, and doubles the bytes of a block
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--one-process", action="store_true")
    options = parser.parse_args()
    exporter = InMemorySpanExporter()
    if options.one_process:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
    engine = {
        "model_path": str(options.model),
        "num_threads": 1,
        "dtype": options.dtype,
        "num_kv_blocks": 256,
        "max_num_seqs": 4,
    }
    settings = {"engine": engine, "kv_transfer": {"backend": options.backend}}

    async def run() -> None:
        start = pair_here if options.one_process else pair_of_processes
        with tempfile.TemporaryDirectory() as folder:
            async with start(Path(folder), settings) as pair:
                await measure(pair, options)

    asyncio.run(run())
    if options.one_process:
        print_timeline(exporter)


if __name__ == "__main__":
    main()
