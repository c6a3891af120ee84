"""What can be seen of the KV plane while it works: the order of chunks, its spans, its numbers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from relevo.v1 import prefill_pb2

from telemetry import attributes, metrics, provider, tracing
from telemetry.config import TelemetryConfig
from tests.integration.workers.solo import LONG_PROMPT, PROMPT, tokens_alone
from tests.integration.workers.test_faults import inject
from tests.worker_client import make_request, read_prefill
from tests.worker_pair import WorkerPair, worker_pair

CHUNK = 32  # tokens a step, by the settings of the pair


@pytest.fixture
async def pair(tmp_path: Path, model_path: Path) -> AsyncIterator[WorkerPair]:
    async with worker_pair(tmp_path, model_path) as started:
        yield started


class Heard:
    """Keeps what ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def started(self, span: ReadableSpan) -> None:
        pass

    def ended(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def heard() -> Iterator[Heard]:
    provider.set_up_tracing("test", TelemetryConfig())
    found = Heard()
    provider.add_listener(found)
    yield found
    provider.remove_listener(found)


async def test_all_but_the_last_chunk_arrive_while_a_long_prompt_is_computed(
    pair: WorkerPair, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(
        monkeypatch,
        {"point": "prefill_step", "action": "delay", "delay_s": 0.15, "count": 0},
    )
    with tracing.span("request"):
        await pair.client.run_pair(make_request(LONG_PROMPT, request_id="a"))
    await pair.client.until_quiet()
    (prefill,), (received,), (sent,) = (
        heard.named(name)
        for name in (
            attributes.SPAN_PREFILL,
            attributes.SPAN_KV_RECEIVE,
            attributes.SPAN_KV_SEND,
        )
    )
    assert [link.context.span_id for link in sent.links] == [received.context.span_id]
    ranges = [
        (each.attributes[attributes.RELEVO_KV_TOKEN_START], each.end_time)
        for each in heard.named(attributes.SPAN_KV_RANGE)
        if each.parent.span_id == received.context.span_id
    ]
    assert len(ranges) >= len(LONG_PROMPT) / CHUNK - 1, "the chunks travelled together"
    late = [start for start, ended_ns in ranges if ended_ns > prefill.end_time]
    assert late, "the last chunk travels after it was computed"
    assert min(late) >= len(LONG_PROMPT) - CHUNK
    assert received.attributes[attributes.RELEVO_KV_BACKEND] == "gloo"
    for side in (received, sent):
        assert side.attributes[attributes.RELEVO_KV_BYTES] > 0
        assert side.attributes[attributes.RELEVO_KV_BLOCKS] >= len(LONG_PROMPT) / 8
        assert side.attributes[attributes.RELEVO_KV_TICKET_WAIT_S] >= 0


async def test_what_a_transfer_moves_is_counted(pair: WorkerPair) -> None:
    client, prefill, decode = pair.client, *(pair.client.workers[n] for n in pair.client.workers)
    assert prefill.description.pool == "prefill"
    _, result = await client.run_pair(make_request(PROMPT, request_id="a"))
    await pair.client.until_counted("decode-0", metrics.KV_TRANSFER_BYTES)
    assert decode.metrics[metrics.KV_TRANSFER_BYTES, ""] == result.kv_transfer_bytes
    await pair.client.until_counted("decode-0", f"{metrics.KV_TRANSFER_SECONDS}_count")

    transfer_id = client.next_transfer_id()
    held = make_request(PROMPT, request_id="held", cache_salt="held")
    await read_prefill(client.open_prefill(held, transfer_id=transfer_id))
    await pair.client.until_counted("prefill-0", metrics.KV_LEASES_OPEN)
    await client.eventually(lambda: prefill.load.blocks.held > 0, what="held blocks")

    stub, (link,) = client.prefill_stub(), decode.load.links
    stale = prefill_pb2.FetchRequest(
        transfer_id=transfer_id,
        epoch=7,
        decode_worker=decode.description.to_ref(),
        generation=link.generation,
        ticket=99,
        token_end=8,
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Fetch(stale, timeout=5.0)
    await pair.client.until_counted("prefill-0", metrics.KV_FENCED_MESSAGES)
    await stub.Release(prefill_pb2.ReleaseRequest(transfer_id=transfer_id, epoch=1))
    await client.until_counted(
        "prefill-0", metrics.KV_LEASES_OPEN, is_right=lambda value: value == 0
    )


async def test_failures_are_counted_by_their_reason(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = pair.client
    failures = metrics.KV_TRANSFER_FAILURES

    def open_both(name: str):
        transfer_id = client.next_transfer_id()
        request = make_request(LONG_PROMPT, request_id=name, cache_salt=name)
        prefilling = client.open_prefill(request, transfer_id=transfer_id)
        return prefilling, client.open_decode(request, transfer_id=transfer_id)

    # Each of these is left in the middle of its prompt.
    inject(monkeypatch, {"point": "prefill_step", "action": "delay", "delay_s": 0.05, "count": 0})
    prefilling, decoding = open_both("cancelled")
    await asyncio.gather(prefilling.read(), decoding.read())
    decoding.cancel()
    await pair.client.until_counted("decode-0", failures, "cancelled")

    prefilling, decoding = open_both("gone")
    await asyncio.gather(prefilling.read(), decoding.read())
    prefilling.cancel()
    await pair.client.until_counted("decode-0", failures, "gone")

    inject(monkeypatch, {"point": "kv_recv", "action": "raise"})
    with pytest.raises(grpc.aio.AioRpcError):
        await client.run_pair(make_request(PROMPT, request_id="a", cache_salt="a"))
    await pair.client.until_counted("decode-0", failures, "link_broken")
    await client.until_linked()


@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
@pytest.mark.parametrize("point", ["kv_send", "kv_recv"])
async def test_a_corrupted_chunk_is_counted_never_cached_and_made_good(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, point: str
) -> None:
    async with worker_pair(
        tmp_path, model_path, both={"kv_transfer": {"backend": backend}}
    ) as pair:
        decode = pair.client.workers["decode-0"]
        request = make_request(PROMPT, request_id="a")
        inject(monkeypatch, {"point": point, "action": "corrupt"})
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await pair.client.run_pair(request)
        assert lost.value.code() is grpc.StatusCode.ABORTED
        await pair.client.until_counted("decode-0", metrics.KV_DIGEST_MISMATCHES)
        await pair.client.until_counted("decode-0", metrics.KV_TRANSFER_FAILURES, "digest_mismatch")
        await pair.client.until_quiet()
        assert decode.load.blocks.cached == 0
        assert decode.block_hashes == set()

        request.request_id = "b"
        _, result = await pair.client.run_pair(request)
        assert result.token_ids == tokens_alone(model_path, PROMPT, 8)
        assert result.num_cached_tokens == 0
        assert decode.metrics[metrics.KV_DIGEST_MISMATCHES, ""] == 1


@pytest.mark.parametrize(
    ("backend", "point", "worker_id"),
    [("gloo", "kv_send", "decode-0"), ("shared_memory", "kv_recv", "prefill-0")],
)
async def test_what_a_link_still_touches_of_a_cancelled_request_is_quarantined(
    tmp_path: Path,
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    point: str,
    worker_id: str,
) -> None:
    """Over Gloo the receiver's blocks are written, over shared memory the sender's are read."""
    # an operation that is late is none that is lost, however busy the machine
    both = {"kv_transfer": {"backend": backend, "transfer_timeout_s": 8.0}}
    async with worker_pair(tmp_path, model_path, both=both) as pair:
        client, worker = pair.client, pair.client.workers[worker_id]
        decode = client.workers["decode-0"]
        generation = decode.load.links[0].generation
        inject(monkeypatch, {"point": point, "action": "delay", "delay_s": 1.5})
        transfer_id = client.next_transfer_id()
        request = make_request(PROMPT, request_id="a")
        prefilling = client.open_prefill(request, transfer_id=transfer_id)
        decoding = client.open_decode(request, transfer_id=transfer_id)
        await asyncio.gather(prefilling.read(), decoding.read())
        await client.eventually(
            lambda: decode.load.links[0].queued_bytes > 0, what="a range under way"
        )
        decoding.cancel()
        await client.eventually(lambda: worker.load.blocks.quarantined > 0, what="quarantine")
        await client.until_quiet(timeout_s=4.0)
        assert decode.load.links[0].generation == generation
