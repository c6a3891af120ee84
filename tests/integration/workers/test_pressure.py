"""Workers with too little room: everything is served in the end, or refused with the numbers."""

import asyncio
from pathlib import Path

import grpc
import pytest

from telemetry import metrics
from tests.integration.workers.solo import PROMPT, tokens_alone
from tests.integration.workers.test_faults import inject
from tests.worker_client import make_request, read_decode, read_prefill
from tests.worker_pair import worker_pair


@pytest.mark.parametrize("through_a_pair", [True, False])
async def test_requests_that_grow_out_of_the_pool_are_preempted_and_keep_their_tokens(
    tmp_path: Path, model_path: Path, *, through_a_pair: bool
) -> None:
    # Three prompts of 4 blocks that become 8 blocks each, in 14.
    prompts = [PROMPT[number : number + 25] for number in range(3)]
    async with worker_pair(tmp_path, model_path, decode={"engine": {"num_kv_blocks": 14}}) as pair:
        client = pair.client
        requests = [
            make_request(prompt, request_id=f"r{number}", max_tokens=35)
            for number, prompt in enumerate(prompts)
        ]
        if through_a_pair:
            results = await asyncio.gather(*(client.run_pair(request) for request in requests))
            decoded = [decode for _, decode in results]
        else:
            calls = [client.open_decode(request, prefill=None) for request in requests]
            decoded = await asyncio.gather(*map(read_decode, calls))
        for prompt, decode in zip(prompts, decoded, strict=True):
            assert decode.token_ids == tokens_alone(model_path, prompt, 35)
        await client.until_counted("decode-0", metrics.PREEMPTIONS)


async def test_a_better_priority_overtakes_what_runs(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the first one still runs when the urgent one comes.
    inject(monkeypatch, {"point": "decode_step", "action": "delay", "delay_s": 0.02, "count": 60})
    one_place = {"engine": {"max_num_seqs": 1, "max_num_batched_tokens": 32}}
    async with worker_pair(tmp_path, model_path, decode=one_place) as pair:
        client = pair.client
        ended: list[str] = []

        async def serve(name: str, max_tokens: int, priority: int) -> list[int]:
            request = make_request(
                PROMPT, request_id=name, max_tokens=max_tokens, priority=priority
            )
            result = await read_decode(client.open_decode(request, prefill=None))
            ended.append(name)
            return result.token_ids

        decode = client.workers["decode-0"]
        first = asyncio.create_task(serve("low-0", 100, 1))
        await client.eventually(
            lambda: decode.load is not None and decode.load.num_running == 1, what="a full worker"
        )
        # Only now: of two calls at once either may arrive first.
        second = asyncio.create_task(serve("low-1", 100, 1))
        await client.eventually(
            lambda: decode.load is not None and decode.load.num_waiting == 1, what="one that waits"
        )
        urgent = await serve("urgent", 4, 0)
        assert ended == ["urgent"]
        assert urgent == tokens_alone(model_path, PROMPT, 4)
        expected = tokens_alone(model_path, PROMPT, 100)
        assert await asyncio.gather(first, second) == [expected, expected]
        assert ended == ["urgent", "low-0", "low-1"]


@pytest.mark.parametrize("small", ["prefill", "decode"])
async def test_what_fits_one_pool_of_a_pair_only_is_refused_with_the_numbers(
    tmp_path: Path, model_path: Path, small: str
) -> None:
    sizes = {small: {"engine": {"num_kv_blocks": 8}}}  # 64 tokens; the prompt has 75
    async with worker_pair(tmp_path, model_path, **sizes) as pair:
        client = pair.client
        request = make_request(PROMPT, request_id="a")
        transfer_id = client.next_transfer_id()
        prefilling = client.open_prefill(request, transfer_id=transfer_id)
        decoding = client.open_decode(request, transfer_id=transfer_id)
        refused = read_prefill(prefilling) if small == "prefill" else read_decode(decoding)
        with pytest.raises(grpc.aio.AioRpcError) as invalid:
            await refused
        assert invalid.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "75" in (invalid.value.details() or "")
        assert "64" in (invalid.value.details() or "")
        prefilling.cancel()
        decoding.cancel()
