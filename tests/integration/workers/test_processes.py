"""Workers as plain processes: the hand-over, and what a lost or frozen one costs.

The processes are shared by the tests of this file; a test starts anew what the one before ended.
"""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
import pytest

from tests.cluster_processes import (
    KV_TRANSFER,
    SLOW,
    SLOW_STEPS,
    ClusterProcesses,
    WorkerProcess,
)
from tests.gate import Gate
from tests.integration.workers.solo import LONG_PROMPT, PROMPT, tokens_alone
from tests.worker_client import (
    WorkerClient,
    make_request,
    read_decode,
    read_prefill,
    worker_client,
)

T = TypeVar("T")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", params=["gloo", "shared_memory"])
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_path: Path
) -> Iterator[ClusterProcesses]:
    cluster = ClusterProcesses(
        tmp_path_factory.mktemp("processes"),
        model_path,
        kv_transfer={"backend": request.param},
        environment=SLOW_STEPS,
    )
    try:
        yield cluster
    finally:
        cluster.stop_all()


class Gates:
    """What decode workers reach a prefill worker through, on a loop that outlives the tests'."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gates", daemon=True)
        self._thread.start()
        self._gates: dict[str, tuple[Gate, str]] = {}

    def in_front_of(self, address: str) -> str:
        if address not in self._gates:
            gate = Gate(address)
            self._gates[address] = gate, self._run(gate.start())
        return self._gates[address][1]

    def freeze(self, address: str) -> None:
        self._loop.call_soon_threadsafe(self._gates[address][0].freeze)

    def open(self, address: str) -> None:
        self._loop.call_soon_threadsafe(self._gates[address][0].open)

    def close(self) -> None:
        for gate, _ in self._gates.values():
            self._run(gate.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)


@pytest.fixture(scope="module")
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.close()


@pytest.fixture
async def client(processes: ClusterProcesses, gates: Gates) -> AsyncIterator[WorkerClient]:
    descriptions = await asyncio.to_thread(processes.ensure, prefill=2, decode=1)
    async with worker_client(processes.token_file, descriptions) as watching:
        watching.detour = gates.in_front_of
        await watching.until_linked(prefill="prefill-0")
        await watching.until_linked(prefill="prefill-1")
        yield watching


def process_of(processes: ClusterProcesses, worker_id: str) -> WorkerProcess:
    worker = processes.newest(worker_id)
    assert worker is not None
    return worker


async def check_hand_over(client: WorkerClient, model_path: Path, prefill: str, name: str) -> None:
    """One request over this pair gives the tokens of an engine alone."""
    request = make_request(PROMPT, request_id=name, cache_salt=name)
    _, decode = await client.run_pair(request, prefill=prefill)
    assert decode.token_ids == tokens_alone(model_path, PROMPT, 8)
    assert decode.kv_transfer_bytes > 0


async def test_two_processes_hand_a_prompt_over(
    processes: ClusterProcesses, client: WorkerClient, model_path: Path
) -> None:
    await check_hand_over(client, model_path, "prefill-0", "a")
    await check_hand_over(client, model_path, "prefill-1", "b")
    await client.until_quiet()


async def test_workers_listen_on_the_loopback_address_only(
    processes: ClusterProcesses, client: WorkerClient
) -> None:
    for worker in processes.workers:
        listening = [
            # gRPC binds IPv4 addresses through dual-stack sockets.
            each.laddr.ip.removeprefix("::ffff:")
            for each in psutil.Process(worker.process.pid).net_connections(kind="tcp")
            if each.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert set(listening) == {"127.0.0.1"}, f"{worker.worker_id} listens on {listening}"


async def test_a_killed_prefill_worker_costs_its_own_link_and_is_linked_again(
    processes: ClusterProcesses, client: WorkerClient, model_path: Path
) -> None:
    decode = client.workers["decode-0"]
    transfer_id = client.next_transfer_id()
    request = make_request(LONG_PROMPT, request_id="a", request_label=SLOW)
    prefilling = client.open_prefill(request, transfer_id=transfer_id)
    decoding = asyncio.ensure_future(
        read_decode(client.open_decode(request, transfer_id=transfer_id))
    )
    await prefilling.read()
    processes.kill(process_of(processes, "prefill-0"))
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await asyncio.wait_for(decoding, 15.0)
    assert lost.value.code() is grpc.StatusCode.ABORTED
    await client.until_quiet("decode-0", "prefill-1")
    await client.eventually(lambda: decode.link_state("prefill-0") != "ready", what="a lost link")
    assert decode.link_state("prefill-1") == "ready"
    await check_hand_over(client, model_path, "prefill-1", "b")

    description = (await asyncio.to_thread(processes.ensure, prefill=2))[0]
    client.watch(description)
    await client.until_linked(prefill="prefill-0")
    await check_hand_over(client, model_path, "prefill-0", "c")
    links = [each for each in decode.load.links if each.peer_id == "prefill-0"]
    assert [each.peer_incarnation for each in links] == [description.incarnation]
    await client.until_quiet("decode-0", "prefill-0", "prefill-1")


async def test_a_frozen_prefill_worker_fails_its_transfers_in_time_and_comes_back(
    processes: ClusterProcesses, client: WorkerClient, model_path: Path
) -> None:
    frozen = process_of(processes, "prefill-0")
    transfer_id = client.next_transfer_id()
    request = make_request(LONG_PROMPT, request_id="a", request_label=SLOW)
    prefilling = client.open_prefill(request, transfer_id=transfer_id)
    decoding = asyncio.ensure_future(
        read_decode(client.open_decode(request, transfer_id=transfer_id, timeout_s=15.0))
    )
    await prefilling.read()
    frozen.signal(signal.SIGSTOP)
    frozen_at_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await decoding
    assert lost.value.code() in {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    assert time.monotonic() - frozen_at_s < 30.0
    await client.until_quiet("decode-0")
    await check_hand_over(client, model_path, "prefill-1", "b")

    prefilling.cancel()
    frozen.signal(signal.SIGCONT)
    await client.until_linked(prefill="prefill-0")
    await client.until_quiet("prefill-0", timeout_s=10.0)
    await check_hand_over(client, model_path, "prefill-0", "c")
    await client.until_quiet()


async def test_a_partition_between_two_workers_costs_their_link_only(
    gates: Gates, client: WorkerClient, model_path: Path
) -> None:
    """No byte of the control plane passes either way, and no connection ends."""
    address = client.workers["prefill-0"].description.address
    transfer_id = client.next_transfer_id()
    request = make_request(LONG_PROMPT, request_id="a", request_label=SLOW)
    prefilling = client.open_prefill(request, transfer_id=transfer_id)
    decoding = asyncio.ensure_future(
        read_decode(client.open_decode(request, transfer_id=transfer_id))
    )
    await prefilling.read()
    gates.freeze(address)
    try:
        await check_hand_over(client, model_path, "prefill-1", "b")
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await asyncio.wait_for(decoding, 10 * KV_TRANSFER["transfer_timeout_s"])
        assert lost.value.code() is grpc.StatusCode.ABORTED
        await client.eventually(
            lambda: client.workers["decode-0"].link_state("prefill-0") != "ready",
            what="a link that is lost",
        )
        # the prefill worker hears of no release: its lease ends
        await read_prefill(prefilling)
        await client.until_quiet(timeout_s=3 * KV_TRANSFER["lease_s"])
    finally:
        gates.open(address)
    # and whatever was held up arrives now
    await client.until_linked(prefill="prefill-0")
    await check_hand_over(client, model_path, "prefill-0", "c")
    await client.until_quiet()


async def test_a_killed_decode_worker_leaves_nothing_held(
    processes: ClusterProcesses, client: WorkerClient
) -> None:
    request = make_request(PROMPT, request_id="a", max_tokens=400, request_label=SLOW)
    running = asyncio.ensure_future(client.run_pair(request))
    decode = client.workers["decode-0"]
    await client.eventually(lambda: decode.load.num_running > 0, what="a running request")
    processes.kill(process_of(processes, "decode-0"))
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await asyncio.wait_for(running, 15.0)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    await client.until_quiet("prefill-0", "prefill-1", timeout_s=4.0)


async def test_sigterm_ends_streams_and_the_process_in_time(
    processes: ClusterProcesses, client: WorkerClient
) -> None:
    request = make_request(PROMPT, request_id="a", max_tokens=400, request_label=SLOW)
    running = asyncio.ensure_future(client.run_pair(request))
    decode = client.workers["decode-0"]
    await client.eventually(lambda: decode.load.num_running > 0, what="a running request")
    process = process_of(processes, "decode-0")
    process.signal(signal.SIGTERM)
    _, result = await running
    assert result.finish_reason in {2, 5}
    assert await asyncio.to_thread(process.process.wait, 15.0) == 0, process.stderr()
    for worker_id in ("prefill-0", "prefill-1"):
        idle = process_of(processes, worker_id)
        assert await asyncio.to_thread(processes.stop, idle) == 0, idle.stderr()
