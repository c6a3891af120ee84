"""A router over fake workers on loopback; after each test nothing may be left running."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import pytest
from relevo.v1 import common_pb2

from router.config import RouterConfig
from router.discovery import StaticDiscovery
from router.generation import Generation
from router.request import EVERYBODY, RoutedRequest, Tenant, TokenBatch
from router.router import Router
from rpc.channel import ChannelPool
from rpc.config import RpcConfig
from telemetry.metrics import Metrics
from telemetry.prometheus_sink import PrometheusSink
from tests.fake_worker_base import FakeWorker
from tests.fake_workers import TOKEN, FakeDecodeWorker, FakePrefillWorker, HandOvers
from tests.patience import until

WorkerT = TypeVar("WorkerT", bound=FakeWorker)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class FakeCluster:
    """Fake workers, and the router that follows them."""

    def __init__(self) -> None:
        self.hand_overs = HandOvers()
        self.discovery = StaticDiscovery([])
        self.workers: list[FakeWorker] = []
        self.sink = PrometheusSink()
        self.channels = ChannelPool(token=TOKEN, config=RpcConfig())
        self.router: Router

    async def add_prefill(self, worker_id: str = "prefill-0", **facts: object) -> FakePrefillWorker:
        worker = FakePrefillWorker(worker_id=worker_id, hand_overs=self.hand_overs)
        return await self._add(worker, facts)

    async def add_decode(self, worker_id: str = "decode-0", **facts: object) -> FakeDecodeWorker:
        worker = FakeDecodeWorker(worker_id=worker_id, hand_overs=self.hand_overs)
        return await self._add(worker, facts)

    async def _add(self, worker: WorkerT, facts: dict[str, object]) -> WorkerT:
        for name, value in facts.items():
            assert hasattr(worker, name), name
            setattr(worker, name, value)
        self.discovery.workers.append(await worker.start())
        self.workers.append(worker)
        return worker

    def forget(self, worker: FakeWorker) -> None:
        """Discovery notices that it is gone."""
        assert worker.description is not None
        self.discovery.workers.remove(worker.description)

    async def start_router(self, *, wait_ready: bool = True, **config: object) -> Router:
        self.router = Router(
            RouterConfig(**{"local_prefill": "never", **config}),  # type: ignore[arg-type]
            self.discovery,
            self.channels,
            ingress_id="ingress",
            metrics=Metrics(self.sink),
            rng=random.Random(7),
        )
        await self.router.start()
        if wait_ready:
            await self.until(lambda: self.router.status()["state"] == "ready")
        return self.router

    async def until(self, is_true: Callable[[], bool], timeout_s: float = 20.0) -> None:
        await until(is_true, timeout_s)

    def generate(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        max_tokens: int = 5,
        timeout_s: float | None = 20.0,
        request_id: str = "request",
        num_choices: int = 1,
        label: str = "",
        tenant: Tenant = EVERYBODY,
    ) -> Generation:
        return self.router.generate(
            RoutedRequest(
                request_id=request_id,
                token_ids=list(prompt),
                sampling=self.sampling(max_tokens),
                timeout_s=timeout_s,
                num_choices=num_choices,
                request_label=label,
                tenant=tenant,
            )
        )

    @staticmethod
    def sampling(max_tokens: int = 5) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(max_tokens=max_tokens)

    def states(self) -> dict[str, str]:
        workers = self.router.status()["workers"]
        assert isinstance(workers, list)
        return {each["id"]: each["state"] for each in workers}

    def metric(self, name: str, **labels: str) -> float:
        return sum(s.value for s in self.sink.samples() if s.name == name and s.labels == labels)

    def assert_nothing_in_flight(self) -> None:
        router = self.router
        assert router.num_running == 0
        assert router.num_waiting == 0
        for worker in router.worker_states():
            assert not worker.attempts, worker.key
            assert worker.num_picks == 0, worker.key


async def collect(generation: Generation) -> list[int]:
    """All tokens; the generation must end well."""
    batches: list[TokenBatch] = []
    try:
        async for batch in generation:
            batches.append(batch)
    finally:
        await generation.aclose()
    assert [b for b in batches if b.finish_reason] == batches[-1:]
    return [token_id for batch in batches for token_id in batch.token_ids]


async def collect_choices(generation: Generation) -> dict[int, list[int]]:
    """The tokens of each choice; each must end well, and once."""
    tokens: dict[int, list[int]] = {}
    ended: list[int] = []
    try:
        async for batch in generation:
            assert batch.choice_index not in ended
            tokens.setdefault(batch.choice_index, []).extend(batch.token_ids)
            if batch.finish_reason is not None:
                ended.append(batch.choice_index)
    finally:
        await generation.aclose()
    assert sorted(ended) == sorted(tokens)
    return tokens


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    before = asyncio.all_tasks()
    fakes = FakeCluster()
    yield fakes
    # Before anything is closed: no call of a request that is over may still be served.
    await fakes.until(lambda: all(w.num_open == 0 or w.is_frozen for w in fakes.workers))
    fakes.assert_nothing_in_flight()
    await fakes.router.stop()
    await fakes.channels.close()
    for worker in fakes.workers:
        worker.is_frozen = False
        await worker.stop()
    await fakes.until(lambda: not (asyncio.all_tasks() - before - {asyncio.current_task()}))
