"""One trace over ingress, prefill and decode: on the page of the ingress and at a collector."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_tracer_provider

from tests.cluster_processes import SLOW, ClusterProcesses
from tests.integration.api.test_whole_path import BODY
from tests.integration.operations.conftest import REQUEST_LOG, Collector

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
REMOTE_SPAN_ID = "00f067aa0ba902b7"
INGRESS = "this process"
# name -> (process, name of the parent)
SPANS = {
    "request": (INGRESS, None),
    "route": (INGRESS, "request"),
    "attempt": (INGRESS, "request"),
    "prefill": ("prefill-0", "attempt"),
    "prefill.queue": ("prefill-0", "prefill"),
    "prefill.chunk": ("prefill-0", "prefill"),
    "kv.send": ("prefill-0", "attempt"),
    "kv.recv": ("decode-0", "attempt"),
    "kv.tail": ("decode-0", "kv.recv"),
    "decode": ("decode-0", "attempt"),
    "decode.slot_wait": ("decode-0", "decode"),
    "decode.first_step": ("decode-0", "decode"),
}


async def complete_trace(http: httpx.AsyncClient, name: str, *span_names: str) -> dict[str, Any]:
    """The trace of a request, once all that its workers have to say has come."""
    deadline_s = time.monotonic() + 40
    while True:
        found = await http.get(f"/v1/traces/{name}")
        if found.status_code == 200:
            trace: dict[str, Any] = found.json()
            if set(span_names) <= {span["name"] for span in trace["spans"]}:
                return trace
        assert time.monotonic() < deadline_s, found.text
        await asyncio.sleep(0.05)


def own_name() -> str:
    """What this process called itself first: a provider of spans keeps the name it began with."""
    provider = get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    return str(provider.resource.attributes["service.instance.id"])


def by_name(trace: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {span["name"]: span for span in trace["spans"]}


async def test_a_request_over_a_pair_is_one_connected_trace(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{REMOTE_SPAN_ID}-01", "x-request-id": "seen"}
    done = await http.post("/v1/completions", json=BODY, headers=headers)
    assert done.status_code == 200, done.text
    trace = await complete_trace(http, "seen", *SPANS)
    assert trace["trace_id"] == TRACE_ID
    assert await complete_trace(http, done.json()["id"]) == trace
    spans = by_name(trace)
    ids = {span["span_id"]: span for span in trace["spans"]}
    places = {INGRESS: own_name(), "decode-0": spans["decode"]["process"]}  # either of the two
    for name, (process, parent) in SPANS.items():
        assert spans[name]["process"] == places.get(process, process), name
        if parent is None:
            assert spans[name]["parent_id"] == REMOTE_SPAN_ID
        else:
            assert ids[spans[name]["parent_id"]]["name"] == parent, name
        assert spans[name]["error"] is None
    assert spans["kv.send"]["links"] == [spans["kv.recv"]["span_id"]]
    facts = spans["request"]["attributes"]
    assert facts["gen_ai.operation.name"] == "text_completion"
    assert facts["gen_ai.usage.output_tokens"] == BODY["max_tokens"]
    assert [each["name"] for each in spans["request"]["events"]] == ["first_token"]
    route = spans["route"]["attributes"]
    assert route["relevo.cost.total_s"] > 0.0
    assert route["relevo.next_best.cost.total_s"] >= 0.9 * route["relevo.cost.total_s"]
    assert {route["relevo.decode.worker"], route["relevo.next_best.decode"]} == {
        "decode-0",
        "decode-1",
    }
    deadline_s = time.monotonic() + 40  # spans leave in batches
    while not set(SPANS) <= {span.name for span in collector.spans}:
        assert time.monotonic() < deadline_s, collector.spans
        await asyncio.sleep(0.1)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert "quick brown fox" not in collector.text + json.dumps(trace)


async def test_under_load_the_parts_of_every_request_sum_exactly(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    bodies = [{**BODY, "prompt": f"{n} {BODY['prompt']}", "max_tokens": 8} for n in range(16)]
    done = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    for each in done:
        assert each.status_code == 200, each.text
        trace = await complete_trace(http, each.json()["id"])
        facts = by_name(trace)["request"]["attributes"]
        first = sums(facts, "relevo.first_token.")
        assert first == pytest.approx(facts["gen_ai.response.time_to_first_chunk"], abs=1e-9)
        second = sums(facts, "relevo.second_token.")
        assert first + second == pytest.approx(facts["relevo.second_token_s"], abs=1e-9)
        usage = each.json()["usage"]
        assert usage["queue_time"] + usage["prompt_time"] == pytest.approx(first, abs=1e-9)
    lines = [json.loads(line) for line in (tmp_path / REQUEST_LOG).read_text().splitlines()]
    assert len(lines) == len(bodies)
    for line in lines:
        parts = line["first_token_parts_s"]
        assert set(parts) == {"queue", "route", "prefill_wait", "prefill", "wire"}
        assert sum(parts.values()) == pytest.approx(line["first_token_s"], abs=1e-9)
        first_and_second = line["first_token_s"] + sum(line["second_token_parts_s"].values())
        assert first_and_second == pytest.approx(line["second_token_s"], abs=1e-9)
    page = (await http.get("/metrics")).text
    summed_s = sum(line["first_token_s"] for line in lines)
    assert total(page, "relevo_time_to_first_token_seconds_sum") == pytest.approx(summed_s)
    assert total(page, "relevo_ttft_part_seconds_sum") == pytest.approx(summed_s)
    assert total(page, "relevo_ttft_part_seconds_count") == 5 * len(bodies)
    second_s = sum(line["second_token_s"] for line in lines)
    assert total(page, "relevo_second_token_part_seconds_sum") == pytest.approx(second_s - summed_s)


def total(page: str, name: str) -> float:
    """The sum over all series of a metric."""
    series = (line for line in page.splitlines() if line.partition("{")[0].split()[0] == name)
    return sum(float(line.rsplit(" ", 1)[1]) for line in series)


def sums(facts: dict[str, Any], prefix: str) -> float:
    parts = [value for key, value in facts.items() if key.startswith(prefix)]
    assert min(parts) >= 0.0
    return float(sum(parts))


async def test_a_migration_stands_in_the_same_trace(
    http: httpx.AsyncClient, processes: ClusterProcesses
) -> None:
    body = {**BODY, "max_tokens": 120, "stream": True}
    headers = {"x-request-id": SLOW}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.aiter_lines()
        async for line in lines:
            if "text" in line and '"text":""' not in line:
                break
        victim = await busy_decode_worker(http)
        worker = processes.newest(victim)
        assert worker is not None
        await asyncio.to_thread(processes.kill, worker)
        async for _ in lines:
            pass
    trace = await complete_trace(http, SLOW, "decode")
    names = [span["name"] for span in trace["spans"]]
    assert names.count("attempt") == 2
    (request,) = (span for span in trace["spans"] if span["name"] == "request")
    assert [each["name"] for each in request["events"]] == ["first_token", "migrated"]
    assert request["events"][1]["attributes"]["relevo.failed_workers"] == [victim]
    assert request["attributes"]["gen_ai.usage.output_tokens"] == 120
    failed, healed = (span for span in trace["spans"] if span["name"] == "attempt")
    assert failed["error"]
    assert healed["error"] is None
    assert failed["attributes"]["relevo.decode.worker"] == victim
    assert healed["attributes"]["relevo.decode.worker"] != victim


async def busy_decode_worker(http: httpx.AsyncClient) -> str:
    deadline_s = time.monotonic() + 30
    while True:
        workers = (await http.get("/v1/loads")).json()["workers"]
        busy = [each for each in workers if each["pool"] == "decode" and each["num_running"]]
        if busy:
            return str(busy[0]["worker_id"])
        assert time.monotonic() < deadline_s, workers
        await asyncio.sleep(0.01)
