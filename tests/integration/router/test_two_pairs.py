"""Two prefill and two decode processes: choices and logprobs are what an undisturbed run says."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from relevo.v1 import common_pb2

from router.config import RouterConfig
from router.generation import Generation
from router.logprobs import TokenLogprobs
from router.request import RoutedRequest, TokenBatch
from router.router import Router
from tests.cluster_processes import SLOW, SLOW_STEPS, ClusterProcesses
from tests.long_form import LONG_FORM
from tests.relay import relay, until_quiet
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TOKENS = 40
NUM_REQUESTS = 16
NEVER_LOCAL = RouterConfig(local_prefill="never")


@dataclass(slots=True)
class Told:
    """What one choice of a request said."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def assert_equal(self, other: "Told") -> None:
        """The same tokens, and the same probabilities but for sums in another order."""
        assert self.token_ids == other.token_ids
        for own, others in (
            (self.logprobs, other.logprobs),
            (self.prompt_logprobs, other.prompt_logprobs),
        ):
            assert [each.rank for each in own] == [each.rank for each in others]
            for one, two in zip(own, others, strict=True):
                assert [token_id for token_id, _ in one.top] == [each for each, _ in two.top]
                numbers = [
                    [each.logprob, *(number for _, number in each.top)] for each in (one, two)
                ]
                assert numbers[0] == pytest.approx(numbers[1], abs=1e-6)


Answer = dict[int, Told]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    folder = tmp_path_factory.mktemp("workers")
    cluster = ClusterProcesses(folder, make_tiny_model(folder / "model"), environment=SLOW_STEPS)
    yield cluster
    cluster.stop_all()


@pytest.fixture
async def router(processes: ClusterProcesses) -> AsyncIterator[Router]:
    """Whole again before each test, quiet after it."""
    workers = await asyncio.to_thread(processes.ensure, prefill=2, decode=2)
    async with relay(processes, workers, NEVER_LOCAL) as router:
        yield router
        await until_quiet(router)


@pytest.fixture
async def pairs(processes: ClusterProcesses) -> AsyncIterator[list[Router]]:
    """A router for each pair, which knows no other: who serves is no matter of cost."""
    workers = await asyncio.to_thread(processes.ensure, prefill=2, decode=2)
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                relay(processes, pair, NEVER_LOCAL, ingress_id=f"pair-{rank}")
            )
            for rank, pair in enumerate(zip(workers[:2], workers[2:], strict=True))
        ]


def generate(router: Router, number: int, *, num_choices: int = 3, label: str = "") -> Generation:
    """One of several requests; the same number is the same request."""
    params = common_pb2.SamplingParams(
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        temperature=1.0,
        top_p=1.0,
        seed=number,
        num_logprobs=2,
        num_prompt_logprobs=1,
    )
    return router.generate(
        RoutedRequest(
            request_id=f"request-{number}-{time.monotonic_ns()}",
            token_ids=[(7 * place + number) % 300 + 3 for place in range(70 + number)],
            sampling=params,
            timeout_s=60.0,
            num_choices=num_choices,
            request_label=label,
        )
    )


async def collect(generation: Generation, told: Answer | None = None) -> Answer:
    told = {} if told is None else told
    async for batch in generation:
        take(told, batch)
    return told


def take(told: Answer, batch: TokenBatch) -> None:
    choice = told.setdefault(batch.choice_index, Told())
    choice.token_ids += batch.token_ids
    choice.logprobs += batch.logprobs
    choice.prompt_logprobs += batch.prompt_logprobs


def assert_equal(got: Answer, expected: Answer) -> None:
    assert got.keys() == expected.keys()
    for choice_index, told in got.items():
        told.assert_equal(expected[choice_index])


def assert_whole(answers: list[Answer]) -> None:
    """Of requests from number 0 on: three different choices, every token with its logprob."""
    for number, answer in enumerate(answers):
        assert len({tuple(told.token_ids) for told in answer.values()}) == 3
        assert {len(told.logprobs) for told in answer.values()} == {NUM_TOKENS}
        assert len(answer[0].prompt_logprobs) == 70 + number - 1


async def test_each_pair_says_what_the_other_says(pairs: list[Router]) -> None:
    numbers = range(NUM_REQUESTS)
    generations = [generate(pairs[number % 2], number) for number in numbers]
    together = await asyncio.gather(*map(collect, generations))
    for number, generation in enumerate(generations):
        report = generation.report
        served_by = (report.prefill_worker_id, report.decode_worker_id)
        assert served_by == (f"prefill-{number % 2}", f"decode-{number % 2}")
    alone = [await collect(generate(pairs[(number + 1) % 2], number)) for number in numbers]
    assert_whole(alone)
    for got, expected in zip(together, alone, strict=True):
        assert_equal(got, expected)


async def test_choices_over_two_pairs_are_what_each_request_says_alone(router: Router) -> None:
    # Which pairs serve is a matter of cost: a worker whose first steps were slow may be left alone.
    generations = [generate(router, number) for number in range(NUM_REQUESTS)]
    together = await asyncio.gather(*map(collect, generations))
    alone = [await collect(generate(router, number)) for number in range(NUM_REQUESTS)]
    assert_whole(alone)
    for got, expected in zip(together, alone, strict=True):
        assert_equal(got, expected)


@pytest.mark.parametrize("num_choices", [pytest.param(1, marks=LONG_FORM), 3])
async def test_logprobs_go_on_exactly_when_their_decode_worker_dies(
    processes: ClusterProcesses, router: Router, num_choices: int
) -> None:
    expected = await collect(generate(router, 9, num_choices=num_choices))
    generation = generate(router, 9, num_choices=num_choices, label=SLOW)
    told: Answer = {}
    while len(told.get(num_choices - 1, Told()).token_ids) < 8:
        take(told, await anext(generation))
    victim = processes.newest(generation.report.decode_worker_id)
    assert victim is not None
    victim.signal(signal.SIGKILL)
    assert_equal(await collect(generation, told), expected)
    assert generation.report.num_migrations == 1
    await asyncio.to_thread(victim.process.wait)
