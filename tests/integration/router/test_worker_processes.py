"""The router over real worker processes with a tiny model: nothing is lost when they die."""

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from relevo.v1 import common_pb2
from tokenizers import Tokenizer

from router.config import RouterConfig
from router.discovery import StaticDiscovery
from router.generation import Generation
from router.request import RoutedRequest
from router.router import Router
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from rpc.token import read_token
from tests.cluster_processes import SLOW, SLOW_STEPS, ClusterProcesses, WorkerProcess
from tests.patience import until
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROMPT = [(7 * n) % 300 + 3 for n in range(100)]
NUM_TOKENS = 60
DISCOVERY = StaticDiscovery([])


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    folder = tmp_path_factory.mktemp("workers")
    model_path = folder / "model"
    make_tiny_model(model_path)
    cluster = ClusterProcesses(folder, model_path, environment=SLOW_STEPS)
    yield cluster
    cluster.stop_all()


@asynccontextmanager
async def routed(processes: ClusterProcesses, mode: str = "never") -> AsyncIterator[Router]:
    """A router over one prefill and two decode workers, whole again before each test."""
    DISCOVERY.workers[:] = processes.ensure(prefill=1, decode=2)
    channels = ChannelPool(token=read_token(processes.token_file), config=RpcConfig())
    router = Router(RouterConfig(local_prefill=mode), DISCOVERY, channels, ingress_id="ingress")
    await router.start()
    try:
        await until(lambda: router.status()["state"] == "ready", 60.0)
        yield router
        await until(lambda: router.num_running == 0)
        for worker in router.worker_states():
            assert not worker.attempts
            assert worker.num_picks == 0
        await until(lambda: all_blocks_are_back(router))
    finally:
        await router.stop()
        await channels.close()


def all_blocks_are_back(router: Router) -> bool:
    loads = [report.load for report in router.loads()]
    return all(load.blocks.used == load.blocks.held == 0 for load in loads)


def generate(
    router: Router,
    *,
    num_tokens: int = NUM_TOKENS,
    seed: int = 0,
    grammar: common_pb2.Grammar | None = None,
    num_choices: int = 1,
    label: str = "",
) -> Generation:
    params = common_pb2.SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        temperature=1.0,
        top_p=1.0,
        seed=seed,
        grammar=grammar,
    )
    return router.generate(
        RoutedRequest(
            request_id=f"request-{time.monotonic_ns()}",
            token_ids=PROMPT,
            sampling=params,
            timeout_s=60.0,
            num_choices=num_choices,
            request_label=label,
        )
    )


async def collect(generation: Generation) -> list[int]:
    try:
        return [token async for batch in generation for token in batch.token_ids]
    finally:
        await generation.aclose()


async def collect_with_stall(generation: Generation, tokens: list[int]) -> float:
    """Read on to the end; the longest wait for a token."""
    longest_s, last_s = 0.0, time.monotonic()
    async for batch in generation:
        tokens += batch.token_ids
        longest_s = max(longest_s, time.monotonic() - last_s)
        last_s = time.monotonic()
    await generation.aclose()
    return longest_s


async def collect_choices(
    generation: Generation, tokens: dict[int, list[int]] | None = None
) -> dict[int, list[int]]:
    tokens = {} if tokens is None else tokens
    try:
        async for batch in generation:
            tokens.setdefault(batch.choice_index, []).extend(batch.token_ids)
    finally:
        await generation.aclose()
    return tokens


async def first_tokens(generation: Generation, count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += (await anext(generation)).token_ids
    return tokens


def holder(processes: ClusterProcesses, worker_id: str) -> WorkerProcess:
    worker = processes.newest(worker_id)
    assert worker is not None, worker_id
    return worker


async def test_every_way_gives_the_same_tokens(processes: ClusterProcesses) -> None:
    outputs = {}
    for mode in ("never", "auto", "fallback"):
        async with routed(processes, mode) as router:
            generation = generate(router)
            outputs[mode] = await collect(generation)
            report = generation.report
            parts = report.queue_s + report.route_s + report.prefill_wait_s + report.prefill_s
            assert parts + report.wire_s == pytest.approx(report.first_token_s, abs=1e-9)
            assert report.computed + report.cached_tokens == len(PROMPT)
            assert (report.kv_transfer_bytes > 0) == (mode == "never") or report.cached_tokens
    assert outputs["never"] == outputs["auto"] == outputs["fallback"]
    assert len(outputs["never"]) == NUM_TOKENS


# Longer than any answer here, so that its end never comes.
WORDS = common_pb2.Grammar(kind=common_pb2.Grammar.KIND_REGEX, text="([a-z]{3,9}-){200}")


@pytest.mark.parametrize(
    ("number", "grammar"),
    [(signal.SIGKILL, None), (signal.SIGSTOP, None), (signal.SIGKILL, WORDS)],
    ids=["killed", "frozen", "killed with a grammar"],
)
async def test_a_decode_worker_that_dies_or_freezes_costs_no_token(
    processes: ClusterProcesses, number: signal.Signals, grammar: common_pb2.Grammar | None
) -> None:
    async with routed(processes) as router:
        expected = await collect(generate(router, seed=5, grammar=grammar))
        if grammar is not None:
            text = Tokenizer.from_file(str(processes.model_path / "tokenizer.json")).decode(
                expected
            )
            assert re.fullmatch("([a-z]{3,9}-)+[a-z]{0,9}", text)
        generation = generate(router, seed=5, grammar=grammar, label=SLOW)
        tokens = await first_tokens(generation, 10)
        victim = holder(processes, generation.report.decode_worker_id)
        victim.signal(number)
        stall_s = await collect_with_stall(generation, tokens)
        assert stall_s < (15.0 if number == signal.SIGSTOP else 10.0)
        report = generation.report
        victim.signal(signal.SIGCONT)
        assert tokens == expected
        assert report.num_migrations == 1
        assert report.last_decode_worker_id != report.decode_worker_id
        if number == signal.SIGSTOP:
            await until(lambda: router.status()["state"] == "ready", 60.0)
        else:
            victim.process.wait()


async def test_choices_go_on_exactly_when_their_decode_worker_dies(
    processes: ClusterProcesses,
) -> None:
    async with routed(processes, "auto") as router:
        alone = await collect_choices(generate(router, seed=5, num_choices=3))
    async with routed(processes) as router:
        expected = await collect_choices(generate(router, seed=5, num_choices=3))
        assert expected == alone
        assert expected[0] == await collect(generate(router, seed=5))
        assert len({tuple(each) for each in expected.values()}) == 3
        generation = generate(router, seed=5, num_choices=3, label=SLOW)
        tokens: dict[int, list[int]] = {}
        while len(tokens.get(1, [])) < 8:
            batch = await anext(generation)
            tokens.setdefault(batch.choice_index, []).extend(batch.token_ids)
        victim = holder(processes, generation.report.decode_worker_id)
        victim.signal(signal.SIGKILL)
        assert await collect_choices(generation, tokens) == expected
        assert generation.report.num_migrations == 1
        victim.process.wait()


async def test_choices_ended_one_by_one_or_together_leave_nothing(
    processes: ClusterProcesses,
) -> None:
    async with routed(processes) as router:
        expected = await collect_choices(generate(router, seed=7, num_choices=3))
        generation = generate(router, seed=7, num_choices=3)
        tokens: dict[int, list[int]] = {}
        async for batch in generation:
            tokens.setdefault(batch.choice_index, []).extend(batch.token_ids)
            if batch.choice_index == 1:
                generation.end_choice(1)
        await generation.aclose()
        assert {0: tokens[0], 2: tokens[2]} == {0: expected[0], 2: expected[2]}
        assert len(tokens[1]) < NUM_TOKENS
        left = generate(router, num_tokens=300, num_choices=4)
        await anext(left)
        await left.aclose()
        await until(lambda: all_blocks_are_back(router), 10.0)


async def test_a_prefill_worker_that_dies_makes_requests_wait(processes: ClusterProcesses) -> None:
    async with routed(processes) as router:
        expected = await collect(generate(router, num_tokens=5))
        processes.kill(holder(processes, "prefill-0"))
        waiting = asyncio.create_task(collect(generate(router, num_tokens=5)))
        started = asyncio.get_running_loop().run_in_executor(
            None, lambda: processes.ensure(prefill=1, decode=2)
        )
        DISCOVERY.workers[:] = await started
        assert await waiting == expected


async def test_cancels_give_everything_back(processes: ClusterProcesses) -> None:
    async with routed(processes) as router:
        for delay_s in (0.0, 0.01, 0.03, 0.08):
            generation = generate(router, num_tokens=300)
            reading = asyncio.create_task(collect(generation))
            await asyncio.sleep(delay_s)
            await generation.aclose()
            await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: all_blocks_are_back(router), 10.0)
