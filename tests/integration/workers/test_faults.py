"""Injected faults cost the request they hit, and leave every pool's books in order."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from relevo.v1 import common_pb2

from faults import plan
from faults.plan import Fault, FaultPlan
from tests.integration.workers.solo import PROMPT, tokens_alone
from tests.worker_client import make_request, read_decode
from tests.worker_pair import WorkerPair, worker_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

_salts = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, model_path: Path
) -> AsyncIterator[WorkerPair]:
    """What a fault costs is over when the next test begins: `check_service` says so."""
    async with worker_pair(tmp_path_factory.mktemp("pair"), model_path) as started:
        yield started


def inject(monkeypatch: pytest.MonkeyPatch, *faults: dict[str, object]) -> None:
    """From now on this process, all its workers included, has these faults."""
    made = [Fault(**{"match": {}, **fault}) for fault in faults]
    monkeypatch.setattr(plan, "_PLAN", FaultPlan(made, None))


def fresh_request(request_id: str) -> common_pb2.EngineRequest:
    """A request whose prompt nobody has cached."""
    return make_request(PROMPT, request_id=request_id, cache_salt=str(next(_salts)))


async def check_service(pair: WorkerPair, model_path: Path) -> None:
    """The pair serves again, over a link that may first have to be rebuilt, and keeps nothing."""
    await pair.client.until_linked(timeout_s=10.0)
    _, decode = await pair.client.run_pair(fresh_request("after"))
    assert decode.token_ids == tokens_alone(model_path, PROMPT, 8)
    await pair.client.until_quiet(timeout_s=4.0)
    for worker in (*pair.prefill, *pair.decode):
        await worker.check_integrity()


@pytest.mark.parametrize("action", ["duplicate", "delay"])
async def test_doubled_and_late_control_messages_change_nothing(
    pair: WorkerPair, model_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    fault = {"point": "control_message", "action": action, "count": 12, "delay_s": 0.02}
    inject(monkeypatch, fault)
    _, decode = await pair.client.run_pair(fresh_request("a"))
    assert decode.token_ids == tokens_alone(model_path, PROMPT, 8)
    inject(monkeypatch)
    await check_service(pair, model_path)


async def test_lost_control_messages_are_made_good_or_lose_the_transfer(
    pair: WorkerPair, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, {"point": "control_message", "action": "drop", "count": 3})
    results = await asyncio.gather(
        pair.client.run_pair(fresh_request("a"), timeout_s=8.0), return_exceptions=True
    )
    if isinstance(results[0], BaseException):
        assert results[0].code() is grpc.StatusCode.ABORTED
    else:
        assert results[0][1].token_ids == tokens_alone(model_path, PROMPT, 8)
    inject(monkeypatch)
    await check_service(pair, model_path)


@pytest.mark.parametrize(
    "fault",
    [
        {"point": "kv_send", "action": "corrupt"},
        {"point": "kv_recv", "action": "corrupt"},
        {"point": "kv_send", "action": "raise"},
        {"point": "kv_recv", "action": "raise"},
    ],
    ids=lambda fault: f"{fault['point']}-{fault['action']}",
)
async def test_kv_that_arrives_wrong_or_not_at_all_is_never_decoded(
    pair: WorkerPair, model_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, object]
) -> None:
    inject(monkeypatch, fault)
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await pair.client.run_pair(fresh_request("a"))
    assert lost.value.code() is grpc.StatusCode.ABORTED
    await pair.client.until_quiet(timeout_s=4.0)
    await check_service(pair, model_path)


@pytest.mark.parametrize("point", ["prefill_step", "decode_step", "sample"])
async def test_a_step_that_fails_fails_its_request_only(
    pair: WorkerPair, model_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    inject(monkeypatch, {"point": point, "action": "raise"})
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await read_decode(pair.client.open_decode(fresh_request("a"), prefill=None))
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    await check_service(pair, model_path)


async def test_an_engine_that_keeps_failing_makes_its_worker_ill(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker_pair(tmp_path, model_path) as pair:
        worker = pair.decode[0]
        worker.check_health()
        inject(monkeypatch, {"point": "prefill_step", "action": "raise", "count": 0})
        codes = set()
        for number in range(7):
            request = make_request(PROMPT, request_id=f"r{number}")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await read_decode(pair.client.open_decode(request, prefill=None))
            codes.add(failed.value.code())
        assert codes == {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}
        with pytest.raises(RuntimeError, match="gave up"):
            worker.check_health()
        decode = pair.client.workers["decode-0"]
        await pair.client.eventually(
            lambda: decode.load.state == "draining", what="a worker that takes no more requests"
        )
        # Its engine answers no more questions about its books.
        del pair.client.workers["decode-0"]
        pair.decode.clear()
        await worker.stop()
