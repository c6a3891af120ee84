"""Several routers, each with a late view of the same workers, and a burst that all looks alike."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from router.config import RouterConfig
from router.router import Router
from tests.fake_worker_base import FakeWorker
from tests.fake_workers import expected_tokens
from tests.integration.router.conftest import FakeCluster, collect

NUM_ROUTERS = 4
NUM_WORKERS = 4  # of each pool
NUM_REQUESTS = 96
SYSTEM_PROMPT = [number % 7 for number in range(160)]


class Crowd:
    """Routers beside the cluster's own, over the same workers."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.routers: list[Router] = []

    async def start(self) -> None:
        for number in range(NUM_ROUTERS):
            router = Router(
                RouterConfig(local_prefill="never"),
                self.cluster.discovery,
                self.cluster.channels,
                ingress_id=f"ingress-{number}",
                rng=random.Random(number),
            )
            self.routers.append(router)
            await router.start()
        await self.cluster.until(lambda: all(map(knows_everybody, self.routers)))

    async def burst(self) -> None:
        """Send it all at once; each answer must be whole."""
        requests = [self.answer(number) for number in range(NUM_REQUESTS)]
        await asyncio.gather(*requests)

    async def answer(self, number: int) -> None:
        self.cluster.router = self.routers[number % NUM_ROUTERS]
        prompt = [*SYSTEM_PROMPT, number, number]
        generation = self.cluster.generate(prompt, max_tokens=4, request_id=f"r{number}")
        assert await collect(generation) == expected_tokens(prompt, 4)


def knows_everybody(router: Router) -> bool:
    """Whether this router may use every worker and every link."""
    states = router.worker_states()
    views = [view for state in states if state.is_routable and (view := state.view()) is not None]
    num_links = sum(len(view.links) for view in views)
    return len(views) == 2 * NUM_WORKERS and num_links == NUM_WORKERS**2


async def report(workers: list[FakeWorker]) -> None:
    """Tell the routers now and then how busy each worker is, as real ones do."""
    while True:
        for worker in workers:
            worker.load.num_running = min(worker.num_open, worker.max_num_seqs)
            worker.load.num_waiting = max(worker.num_open - worker.max_num_seqs, 0)
            worker.load.num_waiting_uncached_tokens = worker.num_open * len(SYSTEM_PROMPT)
            worker.touch()
        await asyncio.sleep(0.1)


@pytest.fixture
async def crowd(cluster: FakeCluster) -> AsyncIterator[Crowd]:
    for number in range(NUM_WORKERS):
        await cluster.add_prefill(f"prefill-{number}", prefill_s=0.3, tick_s=1.0)
        await cluster.add_decode(f"decode-{number}", step_s=0.05, tick_s=1.0)
    for worker in cluster.workers:
        worker.load.prefill_tokens_per_s = 2000.0
    await cluster.start_router()
    own, subject = cluster.router, Crowd(cluster)
    await subject.start()
    reporter = asyncio.create_task(report(cluster.workers))
    yield subject
    reporter.cancel()
    await cluster.until(lambda: all(router.num_running == 0 for router in subject.routers))
    for router in subject.routers:
        cluster.router = router
        cluster.assert_nothing_in_flight()
        await router.stop()
    cluster.router = own


async def test_a_burst_of_one_system_prompt_is_spread_evenly(crowd: Crowd) -> None:
    # Where the machine does other things, reports overtake requests now and then, not each time.
    loads: list[list[int]] = []
    while len(loads) < 5 and not (loads and max(loads[-1]) <= 1.3 * NUM_REQUESTS / NUM_WORKERS):
        for worker in crowd.cluster.workers:
            worker.requests.clear()
        await crowd.burst()
        loads.append([len(worker.requests) for worker in crowd.cluster.workers])
        assert sum(loads[-1]) == 2 * NUM_REQUESTS
    assert max(loads[-1]) <= 1.3 * NUM_REQUESTS / NUM_WORKERS, loads


async def test_workers_that_refuse_what_is_too_much_lose_nothing(crowd: Crowd) -> None:
    """No admission of any worker is overrun, however late the routers' views are."""
    for worker in crowd.cluster.workers:
        worker.max_open = 8
    await crowd.burst()
    assert sum(worker.num_refused for worker in crowd.cluster.workers) > 0
    for router in crowd.routers:
        assert router.num_waiting == 0
