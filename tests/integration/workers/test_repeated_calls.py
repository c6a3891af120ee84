"""A call that arrives twice, late or for nothing leaves a worker as it was."""

import asyncio
from pathlib import Path

import grpc
import pytest
from relevo.v1 import decode_pb2, prefill_pb2

from faults import plan
from faults.plan import Fault, FaultPlan
from tests.integration.workers.solo import LONG_PROMPT, PROMPT, tokens_alone
from tests.worker_client import make_request, read_decode, read_prefill
from tests.worker_pair import worker_pair


async def test_calls_that_arrive_twice_change_nothing(tmp_path: Path, model_path: Path) -> None:
    async with worker_pair(tmp_path, model_path) as pair:
        client = pair.client
        expected = tokens_alone(model_path, PROMPT, 8)
        links = list(client.workers["decode-0"].load.links)
        peers = [client.workers["prefill-0"].description.to_peer()]
        for _ in range(3):
            await client.decode_stub().SetPeers(
                decode_pb2.SetPeersRequest(ingress_id="another", prefill_workers=peers)
            )
        request = make_request(PROMPT, request_id="a")
        transfer_id = client.next_transfer_id()
        first = client.open_prefill(request, transfer_id=transfer_id)
        assert (await first.read()).HasField("progress")
        again = client.open_prefill(request, transfer_id=transfer_id)
        decoding = client.open_decode(request, transfer_id=transfer_id)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_prefill(again)
        await read_prefill(first)
        assert (await read_decode(decoding)).token_ids == expected
        for _ in range(2):
            for epoch, known in ((1, transfer_id), (9, transfer_id), (1, transfer_id + 1_000_000)):
                await client.prefill_stub().Release(
                    prefill_pb2.ReleaseRequest(transfer_id=known, epoch=epoch)
                )
                await client.decode_stub().CancelChoices(
                    decode_pb2.CancelChoicesRequest(
                        transfer_id=known, epoch=epoch, choice_indexes=[0, 7]
                    )
                )
        await client.until_quiet()
        now = client.workers["decode-0"].load.links
        assert [(each.peer_id, each.generation) for each in now] == [
            (each.peer_id, each.generation) for each in links
        ]
        _, decode = await client.run_pair(make_request(PROMPT, request_id="b"))
        assert decode.token_ids == expected


async def test_two_decodes_of_one_transfer_give_the_same_tokens_or_none(
    tmp_path: Path, model_path: Path
) -> None:
    async with worker_pair(tmp_path, model_path) as pair:
        client = pair.client
        request = make_request(PROMPT, request_id="a")
        transfer_id = client.next_transfer_id()
        both = [client.open_decode(request, transfer_id=transfer_id) for _ in range(2)]
        prefilling = client.open_prefill(request, transfer_id=transfer_id)
        results = await asyncio.gather(
            read_prefill(prefilling), *map(read_decode, both), return_exceptions=True
        )
        expected = tokens_alone(model_path, PROMPT, 8)
        told = [each for each in results[1:] if not isinstance(each, BaseException)]
        assert told
        assert all(each.token_ids == expected for each in told)


async def test_a_prompt_that_waits_past_its_deadline_is_not_computed(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_at_a_time = {"engine": {"max_num_seqs": 1}}
    async with worker_pair(tmp_path, model_path, prefill=one_at_a_time) as pair:
        client = pair.client
        slow = Fault(
            point="prefill_step",
            action="delay",
            match={"request_label": "slow"},
            count=0,
            delay_s=0.3,
        )
        monkeypatch.setattr(plan, "_PLAN", FaultPlan([slow], None))
        first = make_request(LONG_PROMPT, request_id="a", request_label="slow")
        running = asyncio.ensure_future(client.run_pair(first))
        await client.eventually(lambda: client.workers["prefill-0"].load.num_running == 1)
        late = make_request(PROMPT, request_id="b", cache_salt="late")
        waiting = client.open_prefill(late, transfer_id=client.next_transfer_id(), timeout_s=0.4)
        with pytest.raises(grpc.aio.AioRpcError) as passed:
            await read_prefill(waiting)
        assert passed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not running.done(), "it was told when there was a place for it"
        await running
        await client.until_quiet()
        # Whole blocks of the first prompt, and none of the second one's.
        num_blocks = len(LONG_PROMPT) // 8
        assert len(client.workers["prefill-0"].block_hashes) == num_blocks
