"""What it costs to see: throughput at 16 streams with metrics, and with every request traced.

    .venv/bin/python -m bench.telemetry [--rounds 20] [--model PATH] [--tokens 16] [--streams 16]
        [--append FILE]

One prefill and one decode process, and a process with two ingresses in front of both, one without
metrics. The same streams are served three ways, in turns whose order rotates: `plain` by the
ingress without, `metrics` by the other, `traced` by the other with a `traceparent` asking for all
spans of every request, which go to a collector that is not there. So the same machine, moment,
workers and caches serve all three. Prints tokens per second and the processor time each token took
in all processes, and the ratios within a round: their median, its 90 % interval (by resampling
rounds) and spread. Processor time is the steadier of the two on a machine that does other things.
With --append the rounds are added to those of the file, and all of them count: several short runs
at quiet moments are as good as a long one.

What seeing costs does not depend on the model: a tiny one shows the difference in processor time
per request, printed last, in many cheap rounds. Held against what a request takes with the model
one serves, it is the share.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil

from api.config import IngressConfig, ModelConfig
from api.ingress import Ingress
from router.config import RouterConfig
from router.discovery import StaticDiscovery
from router.router import Router
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.description import WorkerDescription
from rpc.token import create_token, read_token
from telemetry.config import TelemetryConfig
from telemetry.metrics import Metrics
from telemetry.prometheus_sink import PrometheusSink
from telemetry.provider import set_up_tracing

# Nothing is recorded that a caller did not ask for.
SILENT: Final = TelemetryConfig(sample_ratio=0.0, keep_traces=0)
TRACING: Final = TelemetryConfig(sample_ratio=0.0, otlp_endpoint="http://127.0.0.1:9")
PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Way:
    """A way to be served."""

    has_metrics: bool
    is_traced: bool


WAYS: Final = {
    "plain": Way(has_metrics=False, is_traced=False),
    "metrics": Way(has_metrics=True, is_traced=False),
    "traced": Way(has_metrics=True, is_traced=True),
}


@contextmanager
def workers(model: Path, folder: Path) -> Iterator[list[WorkerDescription]]:
    """One worker process a pool."""
    token_file = folder / "token"
    create_token(token_file)
    settings = {
        "token_file": str(token_file),
        "engine": {"model_path": str(model), "num_threads": 1, "max_num_seqs": 32},
        "telemetry": asdict(SILENT),
    }
    config = folder / "worker.json"
    config.write_text(json.dumps(settings))
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"{pool}_workers", "--config", str(config), "--rank", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for pool in ("prefill", "decode")
    ]
    try:
        lines = [process.stdout.readline() for process in started if process.stdout]
        yield [WorkerDescription.from_dict(json.loads(line)) for line in lines]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)


@asynccontextmanager
async def ingress(
    found: list[WorkerDescription], model: Path, folder: Path, *, has_metrics: bool
) -> AsyncIterator[Ingress]:
    """An ingress in front of them."""
    sink = PrometheusSink()
    channels = ChannelPool(token=read_token(folder / "token"), config=RpcConfig())
    router = Router(
        RouterConfig(local_prefill="never"),
        StaticDiscovery(found),
        channels,
        ingress_id="metrics" if has_metrics else "plain",
        metrics=Metrics(sink) if has_metrics else None,
    )
    opened = Ingress(
        IngressConfig(http_port=0, grpc_port=0, drain_s=0.0),
        ModelConfig(model_id="bench", path=str(model)),
        router=router,
        sink=sink,
        telemetry=TRACING if has_metrics else SILENT,
    )
    await router.start()
    await opened.start()
    try:
        yield opened
    finally:
        await opened.stop()
        await router.stop()
        await channels.close()


async def serve(model: Path) -> None:
    """Be the cluster until the standard input ends."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # nobody answers: known
    set_up_tracing("bench", SILENT)  # of a process the first one counts
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = stack.enter_context(workers(model, folder))
        for has_metrics in (False, True):
            opened = await stack.enter_async_context(
                ingress(found, model, folder, has_metrics=has_metrics)
            )
            while not opened.serving.is_ready():  # noqa: ASYNC110 - once, at the start
                await asyncio.sleep(0.1)
            print(opened.http_port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def load(port: int, options: argparse.Namespace, *, seed: int, is_traced: bool) -> float:
    """Serve so many streams at once and return tokens per second."""

    async def stream(client: httpx.AsyncClient, number: int) -> None:
        start = seed * 7919 + number * 104729
        body = {
            "model": "bench",
            "prompt": [(start + (seed + 1) * n) % options.vocab_size for n in range(PROMPT_TOKENS)],
            "max_tokens": options.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        trace_id = random.randrange(1, 1 << 128)
        parent = {"traceparent": f"00-{trace_id:032x}-{number + 1:016x}-{is_traced:02x}"}
        async with client.stream("POST", "/v1/completions", json=body, headers=parent) as response:
            response.raise_for_status()
            async for _ in response.aiter_raw():
                continue

    num_tokens: int = options.streams * options.tokens
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
        started = time.perf_counter()
        await asyncio.gather(*(stream(client, number) for number in range(options.streams)))
        return num_tokens / (time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one load took."""

    tokens_per_s: float
    cpu_ms: float  # for each token, in all processes of the cluster


class Cluster:
    """All of its processes, and the ports of its two ingresses."""

    def __init__(self, pid: int, plain_port: int, metrics_port: int) -> None:
        self._ports = {False: plain_port, True: metrics_port}
        ingress_process = psutil.Process(pid)
        self._processes = [ingress_process, *ingress_process.children(recursive=True)]

    async def measure(self, way: Way, options: argparse.Namespace, *, seed: int) -> Cost:
        """Load it once."""
        before_s = self._cpu_s()
        port = self._ports[way.has_metrics]
        rate = await load(port, options, seed=seed, is_traced=way.is_traced)
        used_s = self._cpu_s() - before_s
        return Cost(rate, 1e3 * used_s / (options.streams * options.tokens))

    def _cpu_s(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self._processes)


async def compare(cluster: Cluster, options: argparse.Namespace) -> None:
    """Load it in all ways in turns and print the ratios."""
    names = list(WAYS)
    rounds = _read_rounds(options.append)
    seed = random.randrange(1000)
    for number in range(options.rounds + 1):
        order = names[number % 3 :] + names[: number % 3]
        seen = {
            # No way finds what another has left in a cache.
            name: await cluster.measure(
                WAYS[name], options, seed=3 * (seed + number) + names.index(name)
            )
            for name in order
        }
        if number > 0:  # the first warms up
            rounds.append(seen)
            if options.append is not None:
                with options.append.open("a") as file:
                    file.write(json.dumps({name: asdict(seen[name]) for name in names}) + "\n")
            told = (
                f"{n} {seen[n].tokens_per_s:6.1f} tok/s {seen[n].cpu_ms:6.2f} ms" for n in names
            )
            print("   ".join(told), flush=True)
    for name, base in (("metrics", "plain"), ("traced", "metrics"), ("traced", "plain")):
        for what in ("tokens_per_s", "cpu_ms"):
            ratios = sorted(
                getattr(each[name], what) / getattr(each[base], what) for each in rounds
            )
            low, high = _interval(ratios)
            print(
                f"{name} over {base}, {what}: median {statistics.median(ratios):.4f}"
                f" ({low:.4f} to {high:.4f}), spread {ratios[0]:.3f} to {ratios[-1]:.3f},"
                f" {len(ratios)} rounds"
            )
        more_ms = [options.tokens * (each[name].cpu_ms - each[base].cpu_ms) for each in rounds]
        low, high = _interval(more_ms)
        print(
            f"{name} over {base}: {statistics.median(more_ms):.2f} ms of processor time per request"
            f" ({low:.2f} to {high:.2f})"
        )


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies in 90 % of the samples one could have drawn instead."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[100], medians[1899]


def _read_rounds(path: Path | None) -> list[dict[str, Cost]]:
    if path is None or not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: Cost(**cost) for name, cost in line.items()} for line in lines]


def main() -> None:
    """Start the cluster and load it, or be it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--model", type=Path, default=Path(".models/smollm2-135m-instruct"))
    parser.add_argument("--append", type=Path, help="keep the rounds in this file, and count its")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    if options.serve:
        asyncio.run(serve(options.model))
        return
    command = [sys.executable, "-m", "bench.telemetry", "--serve", "--model", str(options.model)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        ports = [int(child.stdout.readline()) for _ in range(2)]
        asyncio.run(compare(Cluster(child.pid, *ports), options))


if __name__ == "__main__":
    main()
