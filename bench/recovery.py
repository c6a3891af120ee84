"""How long a stream stalls when its decode worker is killed or frozen.

    .venv/bin/python -m bench.recovery [--model PATH] [--streams 16] [--affected 20]

One prefill and two decode workers as processes, a router in this one. While all streams run, the
decode worker of most of them is killed (and started again) or stopped (and let on again), until
enough streams were affected of each kind. A stall is the longest time between two tokens of one
stream.
"""

import argparse
import asyncio
import signal
import statistics
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from relevo.v1 import common_pb2

from bench.worker_processes import WorkerProcesses
from router.config import RouterConfig
from router.discovery import StaticDiscovery
from router.generation import Generation
from router.request import RoutedRequest
from router.router import Router
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.token import read_token

NUM_TOKENS = 120
STRIKE_AFTER_TOKENS = 10
PROMPT_TOKENS = 64


@dataclass(slots=True)
class Stream:
    """One client's stream and its longest stall."""

    generation: Generation
    num_tokens: int = 0
    stall_s: float = 0.0

    async def read(self) -> None:
        """Read it to its end."""
        last_s = None
        async for batch in self.generation:
            now_s = time.monotonic()
            if last_s is not None:
                self.stall_s = max(self.stall_s, now_s - last_s)
            last_s = now_s
            self.num_tokens += len(batch.token_ids)


def new_stream(router: Router, number: int) -> Stream:
    """A greedy request of its own prompt."""
    return Stream(
        router.generate(
            RoutedRequest(
                request_id=f"request-{time.monotonic_ns()}",
                token_ids=[10 + (number * 37 + each * 11) % 200 for each in range(PROMPT_TOKENS)],
                sampling=common_pb2.SamplingParams(
                    max_tokens=NUM_TOKENS, ignore_eos=True, top_p=1.0
                ),
                timeout_s=120.0,
            )
        )
    )


async def strike(
    router: Router, workers: WorkerProcesses, discovery: StaticDiscovery, how: str, num_streams: int
) -> list[float]:
    """Strike once; the stalls of the affected streams."""
    streams = [new_stream(router, number) for number in range(num_streams)]
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    while min(stream.num_tokens for stream in streams) < STRIKE_AFTER_TOKENS:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    on = Counter(stream.generation.report.decode_worker_id for stream in streams)
    victim = on.most_common(1)[0][0]
    process = workers.processes[victim]
    process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    await asyncio.gather(*reading)
    assert all(stream.num_tokens == NUM_TOKENS for stream in streams), "tokens were lost"
    if how == "kill":
        process.wait()
        pool, _, rank = victim.rpartition("-")
        await asyncio.to_thread(workers.start, pool, int(rank))
        discovery.workers[:] = list(workers.described.values())
    else:
        process.send_signal(signal.SIGCONT)
    await until_ready(router)
    return [each.stall_s for each in streams if each.generation.report.num_migrations]


async def until_ready(router: Router) -> None:
    """Wait for all workers and links."""
    async with asyncio.timeout(60.0):
        while router.status()["state"] != "ready":  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def measure(workers: WorkerProcesses, *, num_streams: int, num_affected: int) -> None:
    """Strike until enough streams were affected, and say what it cost them."""
    discovery = StaticDiscovery(list(workers.described.values()))
    channels = ChannelPool(token=read_token(workers.token_file), config=RpcConfig())
    router = Router(RouterConfig(local_prefill="never"), discovery, channels, ingress_id="bench")
    await router.start()
    try:
        await until_ready(router)
        for how in ("kill", "freeze"):
            stalls: list[float] = []
            num_strikes = 0
            while len(stalls) < num_affected:
                stalls += await strike(router, workers, discovery, how, num_streams)
                num_strikes += 1
            print(
                f"{how}: {num_strikes} strikes, {len(stalls)} affected streams, stall "
                f"median {statistics.median(stalls):.2f} s, longest {max(stalls):.2f} s",
                flush=True,
            )
    finally:
        await router.stop()
        await channels.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".models/smollm2-135m-instruct"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--affected", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = {
            "model_path": str(arguments.model),
            "model_id": "model",
            "dtype": "float32",
            "num_threads": 1,
            "num_kv_blocks": 512,
            "max_num_seqs": 32,
            "max_model_len": 1024,
        }
        with WorkerProcesses(Path(folder), {"engine": engine}) as workers:
            for pool, rank in (("prefill", 0), ("decode", 0), ("decode", 1)):
                workers.start(pool, rank)
            with suppress(KeyboardInterrupt):
                asyncio.run(
                    measure(
                        workers,
                        num_streams=arguments.streams,
                        num_affected=arguments.affected,
                    )
                )


if __name__ == "__main__":
    main()
