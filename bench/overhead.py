"""How much of the engine's speed reaches HTTP clients: greedy streams, served and in process.

    .venv/bin/python -m bench.overhead [--streams 16] [--rounds 3] [--tokens 128] [--prompt 16]
        [--aggregated] [--threads 1] [--dtype float32]

Starts `relevo serve` with one prefill and one decode worker (`router.local_prefill=never`), or with
one worker for both, loads the same engine in this process with the same thread count, and
lets both generate the same number of tokens in turns (A B B A A B). Prints tokens per second while
all streams run, and the ratio with its spread. The clients are threads of this process, on the same
cores as everything else: with one thread an engine leaves them the second core. Prompts are short,
so that all streams run for most of their tokens. At last it tells who ran on the cores while HTTP
was asked, who waited for one, and how often threads went to sleep (Linux).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil
import torch

from bench.core_time import CoreWatch
from cluster.server_process import ServerProcess
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams

WARM_UP_TOKENS = 8
READY_WITHIN_S = 180.0


@contextmanager
def served(
    model: Path, dtype: str, threads: int, port: int, *, is_aggregated: bool = False
) -> Iterator[str]:
    """Run `relevo serve` with one worker per pool, or only one, and yield its base URL."""
    overrides = {
        "model.path": model,
        "model.dtype": dtype,
        **({"prefill.replicas": 0} if is_aggregated else {"router.local_prefill": "never"}),
        "engine.num_threads": threads,
        "ingress.http_port": port,
        "ingress.grpc_port": port + 1,
    }
    arguments = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    relevo = Path(sys.executable).with_name("relevo")
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(relevo), "serve", *arguments]
        with ServerProcess(command, log=Path(folder) / "relevo.log") as process:
            process.wait_until_ready(url, "/ready", within_s=READY_WITHIN_S)
            yield url


def served_arrivals(url: str, prompt: list[int], num_tokens: int) -> list[float]:
    """Stream one completion; when each of its tokens came, in seconds."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    lines: list[tuple[float, str]] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                lines.append((time.perf_counter(), line))
    arrivals_s: list[float] = []
    for arrived_s, line in lines:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            arrivals_s += [arrived_s] * len(choice.get("token_ids") or ())
    if len(arrivals_s) != num_tokens:
        raise RuntimeError(f"Got {len(arrivals_s)} tokens but expected {num_tokens}")
    return arrivals_s


def all_served(url: str, prompts: list[list[int]], num_tokens: int) -> list[list[float]]:
    """All prompts at once through HTTP; when each token of each came."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: served_arrivals(url, prompt, num_tokens), prompts))


def all_in_process(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[float]]:
    """The same in this process."""
    for number, prompt in enumerate(prompts):
        engine.add_request(
            Request(
                request_id=str(number),
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                sampling_params=SamplingParams(
                    max_tokens=num_tokens, temperature=0.0, ignore_eos=True
                ),
            )
        )
    arrivals: list[list[float]] = [[] for _ in prompts]
    while engine.has_work():
        for output in engine.step().outputs:
            arrivals[int(output.request_id)] += [time.perf_counter()] * len(output.token_ids)
    return arrivals


def tokens_per_s(arrivals: list[list[float]]) -> float:
    """Tokens per second from the last stream's first token to the first stream's last one.

    RuntimeError when that is the lesser part of what they made.
    """
    begin_s, end_s = max(each[0] for each in arrivals), min(each[-1] for each in arrivals)
    num_tokens = sum(begin_s < arrived_s <= end_s for each in arrivals for arrived_s in each)
    num_made = sum(map(len, arrivals))
    if 2 * num_tokens < num_made:
        raise RuntimeError(
            f"Got {num_tokens} of {num_made} tokens while all streams ran: take shorter prompts"
        )
    return num_tokens / (end_s - begin_s)


def main() -> None:
    """Alternate both and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--aggregated", action="store_true", help="one worker for both phases")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--port", type=int, default=18300)
    parser.add_argument("--model", type=Path, default=Path(".models/smollm2-135m-instruct"))
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    config = EngineConfig(
        model_path=str(options.model), dtype=options.dtype, num_threads=options.threads
    )
    engine = Engine(config)
    engine.warm_up()
    generator = torch.Generator().manual_seed(7)
    ratios = []
    serving = served(
        options.model,
        options.dtype,
        options.threads,
        options.port,
        is_aggregated=options.aggregated,
    )
    with serving as url:
        watch = CoreWatch(_processes(url))
        for round_number in range(options.rounds + 1):
            shape = (options.streams, options.prompt)
            prompts = torch.randint(100, 40_000, shape, generator=generator).tolist()
            num_tokens = options.tokens if round_number else WARM_UP_TOKENS  # both sides warm up
            ways = {
                "engine": partial(all_in_process, engine, prompts, num_tokens),
                "HTTP": partial(watch.call, all_served, url, prompts, num_tokens),
            }
            # Whoever goes first changes: the machine may grow faster or slower meanwhile.
            order = sorted(ways, reverse=round_number % 2 == 1)
            arrivals = {name: ways[name]() for name in order}
            if round_number == 0:
                continue
            alone, through = (tokens_per_s(arrivals[name]) for name in ("engine", "HTTP"))
            ratios.append(through / alone)
            print(f"engine {alone:6.1f} tok/s   HTTP {through:6.1f} tok/s   {ratios[-1]:.3f}")
    print(
        f"HTTP over engine, {options.streams} streams: median {statistics.median(ratios):.3f}, "
        f"spread {min(ratios):.3f} to {max(ratios):.3f}, {options.rounds} rounds"
    )
    # The last round's.
    for line in watch.lines(options.streams * options.tokens):
        print(line)


def _processes(url: str) -> dict[str, list[int]]:
    """Who takes part in serving, by process id."""
    status = httpx.get(f"{url}/v1/status", timeout=10).json()
    workers = {each["id"]: [each["pid"]] for each in status["workers"]}
    known = {pid for pids in workers.values() for pid in pids}
    others = {each.pid for each in psutil.Process().children(recursive=True)} - known
    return {**workers, "ingress and Ray": sorted(others)}


if __name__ == "__main__":
    main()
