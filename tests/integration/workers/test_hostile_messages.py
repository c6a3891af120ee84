"""Internal messages that carry the token and make no sense are refused, and nothing breaks."""

import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from relevo.v1 import common_pb2, prefill_pb2, state_pb2

from tests.integration.workers.solo import PROMPT, tokens_alone
from tests.worker_client import make_request, read_decode, read_prefill
from tests.worker_pair import WorkerPair, worker_pair

HUGE = 2**64 - 1
GHOST = common_pb2.WorkerRef(worker_id="ghost", incarnation=3)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["gloo", "shared_memory"])
async def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_path: Path
) -> AsyncIterator[WorkerPair]:
    both = {"kv_transfer": {"backend": request.param}}
    async with worker_pair(tmp_path_factory.mktemp("pair"), model_path, both=both) as started:
        yield started


async def code_of(call: object) -> grpc.StatusCode:
    """How a call ends that is expected to be refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    return refused.value.code()


async def check_serves(pair: WorkerPair, model_path: Path) -> None:
    """The pair still hands over, and keeps nothing of what came before."""
    _, decode = await pair.client.run_pair(make_request(PROMPT, request_id="canary"))
    assert decode.token_ids == tokens_alone(model_path, PROMPT, 8)
    await pair.client.until_quiet()


async def test_requests_without_a_meaning_are_invalid_on_both_sides(
    pair: WorkerPair, model_path: Path
) -> None:
    def changed(**fields: object) -> common_pb2.EngineRequest:
        request = make_request(PROMPT, request_id="bad")
        for name, value in fields.items():
            if name == "token_ids":
                request.ClearField("token_ids")
                request.token_ids.extend(value)  # type: ignore[arg-type]
            elif name == "stop_token_ids":
                request.sampling_params.stop_token_ids.extend(value)  # type: ignore[arg-type]
            else:
                owner = request if hasattr(request, name) else request.sampling_params
                setattr(owner, name, value)
        return request

    bad = [
        common_pb2.EngineRequest(),
        changed(request_id=""),
        changed(token_ids=[]),
        changed(token_ids=[-1] * 75),
        changed(token_ids=[320] * 75),
        changed(token_ids=[5] * 512, num_prompt_tokens=512),
        changed(num_prompt_tokens=0),
        changed(num_prompt_tokens=-5),
        changed(num_prompt_tokens=76),
        changed(num_prompt_tokens=67, max_tokens=8),
        changed(temperature=math.nan),
        changed(temperature=math.inf),
        changed(top_p=math.nan),
        changed(top_k=-1),
        changed(min_p=2.0),
        changed(max_tokens=0),
        changed(min_tokens=-1),
        changed(stop_token_ids=[-1]),
        changed(stop_token_ids=[320]),
    ]
    client = pair.client
    for request in bad:
        prefilling = client.open_prefill(request, transfer_id=client.next_transfer_id())
        assert await code_of(read_prefill(prefilling)) is grpc.StatusCode.INVALID_ARGUMENT, request
        decoding = client.open_decode(request, prefill=None)
        assert await code_of(read_decode(decoding)) is grpc.StatusCode.INVALID_ARGUMENT, request
    await check_serves(pair, model_path)


async def test_fetches_without_a_meaning_are_refused_and_fail_no_servicer(
    pair: WorkerPair, model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, stub = pair.client, pair.client.prefill_stub()
    decode_worker = client.workers["decode-0"].description.to_ref()
    transfer_id = client.next_transfer_id()

    def link() -> state_pb2.LinkStatus:
        return client.workers["decode-0"].load.links[0]

    def fetch(fields: dict[str, object]) -> object:
        right = {
            "transfer_id": transfer_id,
            "epoch": 1,
            "decode_worker": decode_worker,
            "generation": link().generation,
            "ticket": 0,
            "token_start": 0,
            "token_end": 8,
        }
        return stub.Fetch(prefill_pb2.FetchRequest(**{**right, **fields}), timeout=5.0)

    held = make_request(PROMPT, request_id="held")
    await read_prefill(client.open_prefill(held, transfer_id=transfer_id))
    for fields in (
        {"transfer_id": 424242},
        {"epoch": 0},
        {"epoch": 99},
        {"token_start": -8},
        {"token_start": 16},
        {"token_start": 8},
        {"token_end": 76},
        {"token_end": 2**31 - 1},
    ):
        reply = await fetch(fields)  # type: ignore[misc]
        assert reply.verdict == prefill_pb2.FETCH_VERDICT_GONE, fields
    for fields in (
        {"decode_worker": GHOST},
        {"decode_worker": None},
        {"generation": 0},
        {"generation": HUGE},
        # The two sides disagree about their order: that link ends and is made again.
        {"ticket": HUGE},
    ):
        code = await code_of(fetch(fields))
        assert code is grpc.StatusCode.FAILED_PRECONDITION, fields
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    release = prefill_pb2.ReleaseRequest(transfer_id=transfer_id, epoch=1)
    await stub.Release(release)
    await stub.Release(prefill_pb2.ReleaseRequest(transfer_id=HUGE))
    await client.eventually(lambda: link().generation > 1 and link().state == "ready")
    await check_serves(pair, model_path)
