"""How much of the engine's speed reaches an HTTP client: one greedy stream, served and in process.

    .venv/bin/python -m bench.overhead [--rounds 3] [--tokens 128] [--model PATH] [--dtype auto]

Starts `relevo serve` with one prefill and one decode worker (`router.local_prefill=never`), loads
the same engine in this process with the same thread count, and
lets both generate the same number of tokens in turns (A B A B). Prints tokens per second between
the first and the last token, and the ratio with its spread.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling.params import SamplingParams

PROMPT_TOKENS = 128
READY_WITHIN_S = 180.0


@contextmanager
def served(model: Path, dtype: str, threads: int, port: int) -> Iterator[str]:
    """Run `relevo serve` with one worker per pool and yield its base URL."""
    overrides = {
        "model.path": model,
        "model.dtype": dtype,
        "router.local_prefill": "never",
        "engine.num_threads": threads,
        "ingress.http_port": port,
        "ingress.grpc_port": port + 1,
    }
    arguments = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    relevo = Path(sys.executable).with_name("relevo")
    process = subprocess.Popen(
        [str(relevo), "serve", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, process)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise RuntimeError(f"relevo serve ended with {process.returncode}")
        try:
            if httpx.get(f"{url}/ready", timeout=2).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError("relevo serve was not ready in time")


def served_tokens_per_s(url: str, prompt: list[int], num_tokens: int) -> float:
    """Stream one completion and return tokens per second between its first and last token."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals_s = []
    completion_tokens = 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("usage"):
                completion_tokens = chunk["usage"]["completion_tokens"]
            elif chunk["choices"] and chunk["choices"][0]["text"]:
                arrivals_s.append(time.perf_counter())
    if completion_tokens != num_tokens:
        raise RuntimeError(f"Got {completion_tokens = } but expected {num_tokens}")
    return (num_tokens - 1) / (arrivals_s[-1] - arrivals_s[0])


def engine_tokens_per_s(engine: Engine, prompt: list[int], num_tokens: int, name: str) -> float:
    """Generate in this process and return tokens per second between first and last token."""
    engine.add_request(
        Request(
            request_id=name,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling_params=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        )
    )
    arrivals_s = []
    while engine.has_work():
        if any(output.token_ids for output in engine.step().outputs):
            arrivals_s.append(time.perf_counter())
    return (num_tokens - 1) / (arrivals_s[-1] - arrivals_s[0])


def main() -> None:
    """Alternate both and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
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
    with served(options.model, options.dtype, options.threads, options.port) as url:
        for round_number in range(options.rounds + 1):
            prompt = torch.randint(100, 40_000, (PROMPT_TOKENS,), generator=generator).tolist()
            alone = engine_tokens_per_s(engine, prompt, options.tokens, f"round-{round_number}")
            through = served_tokens_per_s(url, prompt, options.tokens)
            if round_number == 0:
                continue  # warm-up of both sides
            ratios.append(through / alone)
            print(f"engine {alone:6.1f} tok/s   HTTP {through:6.1f} tok/s   {ratios[-1]:.3f}")
    print(
        f"HTTP over engine: median {statistics.median(ratios):.3f}, "
        f"spread {min(ratios):.3f} to {max(ratios):.3f}, {options.rounds} rounds"
    )


if __name__ == "__main__":
    main()
