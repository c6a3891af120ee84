"""Ray's control plane fails: its calls now and then, then its head for good. Nothing hangs.

What is documented: requests need no Ray, but Serve takes one failed call to a replica for its end
and replaces it: a loss of workers, of the ingress too. Without its head streams go on and end well,
but nothing is restarted any more, so `relevo serve` says so and ends within the drain and some
seconds.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio

from tests.chaos.cluster import DRAIN_S, START_WITHIN_S, LiveCluster
from tests.chaos.conftest import SOAK_MINUTES
from tests.chaos.load import Answer, Load, ask
from tests.chaos.scenario import Truths
from tests.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not SOAK_MINUTES, reason="a cluster of its own: make soak"),
]

# Of each process, and almost all calls are Serve's controller's: it runs dry. In percent.
FAILING_CALLS = {
    "CoreWorkerService.grpc_client.PushTask": {
        "num_failures": 6,
        "req_failure_prob": 2,
        "resp_failure_prob": 2,
    }
}
SHAKEN = Load(num_requests=20)
SHAKES_WITHIN_S = 240.0  # six replacements, if they come one after the other
ENDS_WITHIN_S = DRAIN_S + 20.0 + 15.0  # what `relevo serve` adds to the drain; a busy machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shaken(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    faults: Path = tmp_path_factory.mktemp("faults")
    environment = {"RAY_testing_rpc_failure": json.dumps(FAILING_CALLS)}
    live = LiveCluster.start(model, faults, environment=environment)
    try:
        await asyncio.to_thread(live.served.wait_until_shown, START_WITHIN_S)
        yield live
    finally:
        await live.close()
        await asyncio.to_thread(live.served.stop)
    assert live.served.survivors() == []


async def test_failing_calls_of_ray_double_no_answer(shaken: LiveCluster) -> None:
    end_s, answers = time.monotonic() + SHAKES_WITHIN_S, list[Answer]()
    while not (await _all_is_well(shaken, answers) and " lost (pid " in shaken.served.output()):
        assert time.monotonic() < end_s, answers[-80:]
        await asyncio.sleep(1.0)
    truths = Truths()
    await truths.learn(shaken.http, SHAKEN)
    for answer in answers:
        if answer.is_complete:
            assert answer.tells() == truths.of(answer)
        else:
            is_cut = all(fault.startswith("the stream broke") for fault in answer.faults)
            assert answer.is_refused or answer.error or is_cut, answer


async def _all_is_well(shaken: LiveCluster, answers: list[Answer]) -> bool:
    """Ask for more; whether each was answered, by a whole cluster."""
    more: list[Answer] = []
    await SHAKEN.run(shaken.served.url, asyncio.Event(), more)
    answers += more
    with contextlib.suppress(httpx.HTTPError):
        return all(answer.is_complete for answer in more) and await shaken.is_whole()
    return False


async def test_streams_end_well_without_the_head_and_then_everything_ends(
    shaken: LiveCluster,
) -> None:
    await shaken.until_whole()
    shaken.strike("slow", {"point": "decode_step", "action": "delay", "count": 0, "delay_s": 0.03})
    children = psutil.Process(shaken.served.process.pid).children(recursive=True)
    [head] = [process for process in children if process.name() == "gcs_server"]
    answers = [Answer("greedy", 100, "last") for _ in range(4)]
    async with httpx.AsyncClient(base_url=shaken.served.url, timeout=60.0) as http:
        running = [asyncio.create_task(ask(http, answer)) for answer in answers]
        while not all(answer.arrivals_s for answer in answers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        head.kill()
        killed_at_s = time.monotonic()
        await asyncio.wait(running)
    assert all(answer.is_complete for answer in answers), answers
    status = await asyncio.to_thread(shaken.served.wait, ENDS_WITHIN_S)
    assert status != 0
    assert time.monotonic() - killed_at_s < ENDS_WITHIN_S
    assert "Ray has ended" in shaken.served.output()
    assert shaken.served.survivors() == []
