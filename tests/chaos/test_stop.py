"""The last file here: the cluster is told to end while clients stream."""

import asyncio
import signal

import httpx
import pytest

from tests.chaos.cluster import LiveCluster
from tests.chaos.conftest import SOAK_MINUTES
from tests.chaos.load import Answer, ask
from tests.chaos.scenario import Truths
from tests.served_cluster import is_taken

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.skipif(not SOAK_MINUTES, reason="the short form ends the cluster at rest"),
]


async def test_sigterm_lets_streams_end_and_then_everything(
    cluster: LiveCluster, truths: Truths
) -> None:
    await cluster.until_whole()
    slow = {"point": "decode_step", "action": "delay", "count": 0, "delay_s": 0.02}
    cluster.strike("slow", slow)
    answers = [Answer("greedy", 60, "last") for _ in range(4)]
    async with httpx.AsyncClient(base_url=cluster.served.url, timeout=60.0) as http:
        running = [asyncio.create_task(ask(http, answer)) for answer in answers]
        while not all(answer.arrivals_s for answer in answers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(asyncio.to_thread(cluster.served.stop, signal.SIGTERM))
        await asyncio.wait(running)
    assert all(answer.is_complete for answer in answers), answers
    assert await stopping == 0, cluster.served.output()
    assert cluster.served.survivors() == []
    assert not is_taken(cluster.served.http_port)
    assert not is_taken(cluster.served.grpc_port)
