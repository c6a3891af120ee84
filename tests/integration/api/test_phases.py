"""What a client sees across the hand-over, and what it leaves behind when it goes away."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import httpx
import psutil
import pytest

from api.ingress import Ingress
from router.config import RouterConfig
from tests.cluster_processes import PATIENT, ClusterProcesses
from tests.integration.api.test_whole_path import quiescent, until_ready
from tests.relay import ingress_over
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# The client's label chooses the phase that is stretched, so that it can be left in its middle.
FAULTS = [
    {
        "point": point,
        "action": "delay",
        "delay_s": 0.3,
        "count": 0,
        "match": {"request_label": label},
    }
    for point, label in (
        ("prefill_step", "slow-prefill"),
        ("kv_send", "slow-transfer"),
        ("decode_step", "slow-decode"),
    )
]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    folder = tmp_path_factory.mktemp("phases")
    cluster = ClusterProcesses(folder, make_tiny_model(folder / "model"), kv_transfer=PATIENT)
    environment = {"RELEVO_TESTING": "1", "RELEVO_FAULT_PLAN": json.dumps(FAULTS)}
    try:
        for pool in ("prefill", "decode"):
            cluster.start(pool, environment=environment)
        yield cluster
    finally:
        cluster.stop_all()


@pytest.fixture
async def ingress(processes: ClusterProcesses) -> AsyncIterator[Ingress]:
    workers = await asyncio.to_thread(processes.ensure)
    async with ingress_over(processes, workers, RouterConfig(local_prefill="never")) as ingress:
        yield ingress


@pytest.fixture
async def http(ingress: Ingress) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{ingress.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await until_ready(client)
        yield client


def body(prompt: str, **changes: Any) -> dict[str, Any]:
    settings = {"model": "tiny", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    return {**settings, "prompt": prompt, **changes}


async def complete(http: httpx.AsyncClient, **changes: Any) -> Mapping[str, Any]:
    response = await http.post("/v1/completions", json=body(**changes))
    assert response.status_code == 200, response.text
    choice: Mapping[str, Any] = response.json()["choices"][0]
    return choice


async def stream_text(http: httpx.AsyncClient, **changes: Any) -> tuple[str, str]:
    """Text and finish reason of a stream."""
    response = await http.post("/v1/completions", json=body(**changes, stream=True))
    chunks = [
        json.loads(line.removeprefix("data: "))["choices"][0]
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    return "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]


async def prompt_with_two_letters(http: httpx.AsyncClient) -> tuple[str, str, str]:
    """A prompt whose first token, from prefill, and second, from decode, are each plain text."""
    for number in range(200):
        prompt = f"Number {number} is a prompt that fills more than one block of the cache."
        first = (await complete(http, prompt=prompt, max_tokens=1))["text"]
        both = (await complete(http, prompt=prompt, max_tokens=2))["text"]
        second = both.removeprefix(first)
        if first.isascii() and second.isascii() and first and second:
            return prompt, first, second
    raise AssertionError("no prompt gives two tokens of plain text")


async def test_a_stop_string_that_spans_the_hand_over_is_held_back(
    http: httpx.AsyncClient,
) -> None:
    prompt, first, second = await prompt_with_two_letters(http)
    stop = first[-1] + second[0]
    expected = (first + second)[: (first + second).index(stop)]
    choice = await complete(http, prompt=prompt, stop=stop)
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    assert await stream_text(http, prompt=prompt, stop=stop) == (expected, "stop")
    await quiescent(http)


async def loads(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    workers = (await http.get("/v1/loads")).json()["workers"]
    return {load["worker_id"]: load for load in workers}


PHASES: dict[str, Callable[[dict[str, dict[str, Any]]], bool]] = {
    "slow-prefill": lambda load: load["prefill-0"]["num_running"] > 0,
    "slow-transfer": lambda load: load["decode-0"]["num_transferring"] > 0,
    "slow-decode": lambda load: load["decode-0"]["num_running"] > 0,
}


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("label", PHASES)
async def test_a_client_that_leaves_frees_the_blocks_of_both_sides(
    http: httpx.AsyncClient, label: str, *, stream: bool
) -> None:
    prompt = f"{label} {stream}: a prompt of several chunks, none of them cached. " * 2
    request = asyncio.create_task(
        http.post(
            "/v1/completions",
            json=body(prompt, stream=stream, cache_salt=f"{label}-{stream}"),
            headers={"x-request-id": label},
        )
    )
    deadline_s = time.monotonic() + 30
    while not PHASES[label](await loads(http)):
        assert not request.done(), request.result().text
        assert time.monotonic() < deadline_s, await loads(http)
        await asyncio.sleep(0.02)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await quiescent(http)
    for load in (await loads(http)).values():
        blocks = load["blocks"]
        states = ("free", "cached", "used", "held", "quarantined")
        assert sum(blocks[state] for state in states) == blocks["total"]


async def test_idle_workers_use_no_cpu(
    processes: ClusterProcesses, http: httpx.AsyncClient
) -> None:
    await complete(http, prompt="One request, so that every thread has run once.")
    await quiescent(http)
    watched = [psutil.Process(worker.process.pid) for worker in processes.workers]
    before_s = [sum(each.cpu_times()[:2]) for each in watched]
    await asyncio.sleep(2.0)
    used_s = [
        sum(each.cpu_times()[:2]) - before for each, before in zip(watched, before_s, strict=True)
    ]
    # A spinning thread would use all 2 s; the state's ticks, once a second, are a few milliseconds.
    assert max(used_s) < 0.1, used_s
