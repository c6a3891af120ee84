"""A prefill and a decode worker over gRPC and a Gloo link: tokens, cancels, leases, drains."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from telemetry import metrics
from tests.integration.workers.solo import LONG_PROMPT, PROMPT, tokens_alone
from tests.integration.workers.test_faults import inject
from tests.worker_client import make_request, read_decode, read_prefill
from tests.worker_pair import WorkerPair, worker_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

# So that something can be done in the middle of a request.
SLOW_PREFILL = {"point": "prefill_step", "action": "delay", "delay_s": 0.05, "count": 0}
SLOW_DECODE = {"point": "decode_step", "action": "delay", "delay_s": 0.02, "count": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pair(
    tmp_path_factory: pytest.TempPathFactory, model_path: Path
) -> AsyncIterator[WorkerPair]:
    async with worker_pair(tmp_path_factory.mktemp("pair"), model_path) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def pair(shared_pair: WorkerPair) -> AsyncIterator[WorkerPair]:
    """A pair that serves several tests; each salts its prompts, and leaves the books in order."""
    yield shared_pair
    await shared_pair.client.until_quiet(timeout_s=10.0)
    for worker in (*shared_pair.prefill, *shared_pair.decode):
        await worker.check_integrity()


@pytest_asyncio.fixture(loop_scope="module")
async def own_pair(tmp_path: Path, model_path: Path) -> AsyncIterator[WorkerPair]:
    async with worker_pair(tmp_path, model_path) as started:
        yield started


@pytest.mark.parametrize("backend", ["shared_memory", "auto"])
async def test_shared_memory_hands_over_the_same_tokens_and_frees_both_sides(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    both = {"kv_transfer": {"backend": backend}}
    prefill = {"engine": {"block_size": 16, "num_kv_blocks": 32}} if backend == "auto" else {}
    async with worker_pair(tmp_path, model_path, both=both, prefill=prefill) as pair:
        client = pair.client
        (link,) = client.workers["decode-0"].load.links
        assert link.backend == "shared_memory"
        assert link.reason
        _, decode = await client.run_pair(make_request(PROMPT, request_id="a", max_tokens=12))
        assert decode.token_ids == tokens_alone(model_path, PROMPT, 12)
        assert decode.kv_transfer_bytes > 0

        inject(monkeypatch, SLOW_PREFILL)
        transfer_id = client.next_transfer_id()
        request = make_request(LONG_PROMPT, request_id="b")
        prefilling = client.open_prefill(request, transfer_id=transfer_id)
        decoding = client.open_decode(request, transfer_id=transfer_id)
        await decoding.read()
        await prefilling.read()
        decoding.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await read_prefill(prefilling)
        await client.until_quiet()


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_auto_falls_back_to_gloo_where_memory_cannot_be_shared_and_says_why(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The prefill worker gets no memory of that kind; or the decode worker cannot map it."""

    def refuse(*_arguments: object) -> object:
        raise OSError("not here")

    if where == "prefill":
        monkeypatch.setattr("engine.kv_cache.SharedMemory", refuse)
    else:
        monkeypatch.setattr("kv_transfer.shared_memory_channel._map", refuse)
    async with worker_pair(tmp_path, model_path, both={"kv_transfer": {"backend": "auto"}}) as pair:
        (link,) = pair.client.workers["decode-0"].load.links
        assert link.backend == "gloo"
        assert link.reason.startswith("not shared_memory: ")
        assert link.generation == (1 if where == "prefill" else 2)
        assert ("its pool lies in private memory" in link.reason) == (where == "prefill")
        assert ("not here" in link.reason) == (where == "decode")
        _, decode = await pair.client.run_pair(make_request(PROMPT, request_id="a"))
        assert decode.token_ids == tokens_alone(model_path, PROMPT, 8)
        assert decode.kv_transfer_bytes > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_handed_over_request_gives_the_tokens_of_one_engine(
    pair: WorkerPair, model_path: Path, temperature: float
) -> None:
    request = make_request(
        PROMPT,
        request_id="a",
        cache_salt=f"one {temperature}",
        max_tokens=12,
        temperature=temperature,
        seed=5,
    )
    prefill, decode = await pair.client.run_pair(request)
    assert decode.token_ids == tokens_alone(model_path, PROMPT, 12, temperature=temperature)
    assert decode.token_ids[:1] == list(prefill.tokens.token_ids)
    assert decode.start_position == prefill.tokens.start_position == len(PROMPT)
    assert decode.kv_transfer_bytes > 0
    assert [each.num_computed_tokens for each in prefill.progress] == [32, 64, 75]


async def test_one_engine_alone_decodes_without_a_prefill_worker(
    pair: WorkerPair, model_path: Path
) -> None:
    call = pair.client.open_decode(
        make_request(PROMPT, request_id="a", cache_salt="alone"), prefill=None
    )
    decode = await read_decode(call)
    assert decode.token_ids == tokens_alone(model_path, PROMPT, 8)
    assert decode.kv_transfer_bytes == 0
    assert decode.timings.prefill_s > 0


async def test_only_what_the_decode_worker_lacks_travels(
    pair: WorkerPair, model_path: Path
) -> None:
    await read_decode(
        pair.client.open_decode(
            make_request(PROMPT[:40], request_id="a", cache_salt="lacks"), prefill=None
        )
    )
    _, decode = await pair.client.run_pair(make_request(PROMPT, request_id="b", cache_salt="lacks"))
    assert decode.token_ids == tokens_alone(model_path, PROMPT, 8)
    assert decode.num_cached_tokens == 40
    whole = 75 * pair.client.workers["decode-0"].hello.kv_bytes_per_token
    assert 0 < decode.kv_transfer_bytes < whole

    _, again = await pair.client.run_pair(make_request(PROMPT, request_id="c", cache_salt="lacks"))
    assert again.token_ids == decode.token_ids
    assert again.num_cached_tokens == 72


async def test_different_block_sizes_hand_over(tmp_path: Path, model_path: Path) -> None:
    sizes = {
        "prefill": {"engine": {"block_size": 16, "num_kv_blocks": 32}},
        "decode": {"engine": {"block_size": 8}},
    }
    async with worker_pair(tmp_path, model_path, **sizes) as pair:
        _, decode = await pair.client.run_pair(make_request(PROMPT, request_id="a"))
        assert decode.token_ids == tokens_alone(model_path, PROMPT, 8)


async def test_a_request_that_ends_with_its_first_token_moves_no_kv(pair: WorkerPair) -> None:
    request = make_request(PROMPT, request_id="a", cache_salt="first", max_tokens=1)
    prefill, decode = await pair.client.run_pair(request)
    assert prefill.tokens.finish_reason == decode.finish_reason == 2
    assert decode.token_ids == list(prefill.tokens.token_ids)


async def test_many_requests_at_once_all_finish(pair: WorkerPair, model_path: Path) -> None:
    prompts = [PROMPT[number : number + 30] for number in range(6)]
    requests = [
        make_request(prompt, request_id=f"r{number}", cache_salt="many")
        for number, prompt in enumerate(prompts)
    ]
    results = await asyncio.gather(*(pair.client.run_pair(request) for request in requests))
    for prompt, (_, decode) in zip(prompts, results, strict=True):
        assert decode.token_ids == tokens_alone(model_path, prompt, 8)


async def test_cancelling_prefill_while_it_computes_frees_both_sides(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, SLOW_PREFILL)
    client = pair.client
    transfer_id = client.next_transfer_id()
    request = make_request(LONG_PROMPT, request_id="a", cache_salt="cancel 1")
    prefilling = client.open_prefill(request, transfer_id=transfer_id)
    decoding = asyncio.ensure_future(
        read_decode(client.open_decode(request, transfer_id=transfer_id))
    )
    await prefilling.read()
    prefilling.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await decoding
    assert lost.value.code() is grpc.StatusCode.ABORTED
    await client.until_quiet()


async def test_cancelling_decode_while_the_kv_comes_frees_both_sides(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, SLOW_PREFILL)
    client = pair.client
    transfer_id = client.next_transfer_id()
    request = make_request(LONG_PROMPT, request_id="a", cache_salt="cancel 2")
    prefilling = client.open_prefill(request, transfer_id=transfer_id)
    decoding = client.open_decode(request, transfer_id=transfer_id)
    await decoding.read()
    await prefilling.read()
    decoding.cancel()
    # The decode worker releases the transfer: nobody wants the rest of the prompt.
    with pytest.raises(grpc.aio.AioRpcError):
        await read_prefill(prefilling)
    await client.until_quiet()


async def test_cancelling_decode_while_it_decodes_frees_its_blocks(pair: WorkerPair) -> None:
    client = pair.client
    transfer_id = client.next_transfer_id()
    request = make_request(PROMPT, request_id="a", cache_salt="cancel 3", max_tokens=400)
    prefilling = asyncio.ensure_future(
        read_prefill(client.open_prefill(request, transfer_id=transfer_id))
    )
    decoding = client.open_decode(request, transfer_id=transfer_id)
    for _ in range(4):
        await decoding.read()
    decoding.cancel()
    await prefilling
    await client.until_quiet()


async def test_a_deadline_frees_both_sides(pair: WorkerPair) -> None:
    request = make_request(PROMPT, request_id="a", cache_salt="deadline", max_tokens=400)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await pair.client.run_pair(request, timeout_s=0.4)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await pair.client.until_quiet()


async def test_kv_that_nobody_fetches_is_given_up_after_its_lease(pair: WorkerPair) -> None:
    client = pair.client
    request = make_request(PROMPT, request_id="a", cache_salt="lease")
    await client.refresh("prefill-0")
    num_before = client.workers["prefill-0"].metrics.get((metrics.LEASE_EXPIRED, ""), 0)
    await read_prefill(client.open_prefill(request, transfer_id=client.next_transfer_id()))
    prefill = client.workers["prefill-0"]
    await client.eventually(lambda: prefill.load.blocks.held > 0, what="held blocks")
    await client.until_quiet(timeout_s=4.0)
    await client.until_counted(
        "prefill-0", metrics.LEASE_EXPIRED, is_right=lambda value: value == num_before + 1
    )


async def test_decode_without_a_matching_prefill_is_lost_in_time(pair: WorkerPair) -> None:
    request = make_request(PROMPT, request_id="a", cache_salt="lost")
    call = pair.client.open_decode(request, transfer_id=pair.client.next_transfer_id())
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await asyncio.wait_for(read_decode(call), 20.0)
    assert lost.value.code() is grpc.StatusCode.ABORTED


async def test_another_incarnation_is_refused(pair: WorkerPair) -> None:
    client, workers = pair.client, pair.client.workers.values()
    described = [worker.description for worker in workers]
    for worker in workers:
        worker.description = replace(worker.description, incarnation=17)
    request = make_request(PROMPT, request_id="a")
    try:
        for call in (
            client.open_prefill(request, transfer_id=1),
            client.open_decode(request, prefill=None),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as stale:
                await call.read()
            assert stale.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    finally:
        for worker, description in zip(workers, described, strict=True):
            worker.description = description


async def test_a_request_that_can_never_fit_is_invalid(pair: WorkerPair) -> None:
    request = make_request(LONG_PROMPT * 2, request_id="a")
    transfer_id = pair.client.next_transfer_id()
    for reading in (
        read_prefill(pair.client.open_prefill(request, transfer_id=transfer_id)),
        read_decode(pair.client.open_decode(request, prefill=None)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as invalid:
            await reading
        assert invalid.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_full_worker_refuses_at_once_and_says_when_to_come_back(
    tmp_path: Path, model_path: Path
) -> None:
    small = {"max_waiting_requests": 1, "engine": {"max_num_seqs": 1}}
    async with worker_pair(tmp_path, model_path, both=small) as pair:
        calls = [
            pair.client.open_decode(
                make_request(PROMPT, request_id=f"r{number}", max_tokens=60), prefill=None
            )
            for number in range(4)
        ]
        results = await asyncio.gather(
            *(read_decode(call) for call in calls), return_exceptions=True
        )
        refused = [each for each in results if isinstance(each, grpc.aio.AioRpcError)]
        assert {each.code() for each in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert 1 <= len(refused) <= 3


async def test_a_drain_lets_streams_finish_and_refuses_new_ones(
    own_pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, SLOW_DECODE)
    client = own_pair.client
    request = make_request(PROMPT, request_id="a", max_tokens=30)
    running = asyncio.ensure_future(client.run_pair(request))
    decode = client.workers["decode-0"]
    await client.eventually(lambda: decode.load.num_running > 0, what="a running request")
    draining = asyncio.ensure_future(own_pair.decode[0].drain(20.0))
    await client.eventually(lambda: decode.load.state == "draining", what="a draining worker")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.open_decode(make_request(PROMPT, request_id="b"), prefill=None).read()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    _, result = await running
    assert len(result.token_ids) == 30
    await asyncio.wait_for(draining, 15.0)


async def test_streams_that_outlast_a_drain_end_with_migrate(
    own_pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, SLOW_DECODE)
    client = own_pair.client
    long = make_request(PROMPT, request_id="a", max_tokens=400)
    running = asyncio.ensure_future(client.run_pair(long))
    alone = client.open_decode(
        make_request(PROMPT[:9], request_id="b", max_tokens=480), prefill=None
    )
    alone_result = asyncio.ensure_future(read_decode(alone))
    stuck = client.open_decode(
        make_request(PROMPT, request_id="c"), transfer_id=client.next_transfer_id()
    )
    stuck_result = asyncio.ensure_future(read_decode(stuck))
    decode = client.workers["decode-0"]
    await client.eventually(lambda: decode.load.num_running == 2, what="running requests")
    await own_pair.decode[0].drain(5.1)
    for result in ((await running)[1], await alone_result, await stuck_result):
        assert result.finish_reason == 5


async def test_a_draining_prefill_worker_migrates_what_it_still_computes(
    own_pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, SLOW_PREFILL)
    client = own_pair.client
    transfer_id = client.next_transfer_id()
    call = client.open_prefill(make_request(LONG_PROMPT, request_id="a"), transfer_id=transfer_id)
    await call.read()
    draining = asyncio.ensure_future(own_pair.prefill[0].drain(5.0))
    result = await read_prefill(call)
    assert result.tokens.finish_reason == 5
    await draining
