"""Text in, text out, through real workers: ingress, router, a prefill and a decode process."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
from relevo.v1 import inference_pb2, inference_pb2_grpc

from api.ingress import Ingress
from router.config import RouterConfig
from tests.cluster_processes import PATIENT, ClusterProcesses
from tests.patience import naps
from tests.relay import ingress_over
from tests.tiny_model import make_tiny_model

PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
BODY = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
async def ingress(tmp_path: Path) -> AsyncIterator[Ingress]:
    model_path = make_tiny_model(tmp_path / "model")
    cluster = ClusterProcesses(tmp_path, model_path, kv_transfer=PATIENT)
    try:
        descriptions = await asyncio.to_thread(cluster.ensure, prefill=1, decode=1)
        config = RouterConfig(local_prefill="never")
        async with ingress_over(cluster, descriptions, config) as ingress:
            yield ingress
    finally:
        await asyncio.to_thread(cluster.stop_all)


async def until_ready(http: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + 60
    while (await http.get("/ready")).status_code != 200:
        assert time.monotonic() < deadline, (await http.get("/v1/status")).text
        await asyncio.sleep(0.1)


async def quiescent(http: httpx.AsyncClient) -> None:
    """Nothing runs and no block is used or held in any pool, within two seconds of an own core."""
    for _ in naps(2.0, 0.05):
        loads = (await http.get("/v1/loads")).json()["workers"]
        blocks = [load["blocks"] for load in loads]
        is_quiet = all(load["num_running"] + load["num_waiting"] == 0 for load in loads)
        if is_quiet and all(each["used"] + each["held"] == 0 for each in blocks):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the pools are not quiet: {loads}")


async def every_parameter_is_the_same_whole_and_streamed(http: httpx.AsyncClient) -> None:
    """The first token comes from the prefill worker, the others from the decode worker."""
    body = {
        **BODY,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 12,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"70": 3},
        "bad_words": ["e"],
        "logprobs": 2,
        "echo": True,
        "return_token_ids": True,
    }
    whole = (await http.post("/v1/completions", json=body)).json()
    choice = whole["choices"][0]
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert choice["text"].startswith(PROMPT)
    num_prompt_tokens = whole["usage"]["prompt_tokens"]
    scores = choice["logprobs"]["token_logprobs"]
    assert len(scores) == num_prompt_tokens + 12
    assert scores[0] is None
    streamed = await http.post("/v1/completions", json={**body, "stream": True})
    chunks = [
        httpx.Response(200, content=line[6:]).json()["choices"][0]
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
    ]
    assert [i for c in chunks for i in c.get("token_ids", [])] == choice["token_ids"]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    told = [each for c in chunks if c["logprobs"] for each in c["logprobs"]["token_logprobs"]]
    assert told[1:] == pytest.approx(scores[1:], rel=1e-9)
    # With the prompt cached on both workers, and without its logprobs: the same tokens.
    plain = {**body, "echo": False, "logprobs": None}
    again = (await http.post("/v1/completions", json=plain)).json()
    assert again["choices"][0]["token_ids"] == choice["token_ids"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_text_goes_the_whole_way_and_leaves_nothing_behind(ingress: Ingress) -> None:
    url = f"http://127.0.0.1:{ingress.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http:
        early = await http.post("/v1/completions", json=BODY)
        assert early.status_code in {200, 503}
        await until_ready(http)
        cold = (await http.post("/v1/completions", json=BODY)).json()
        warm = (await http.post("/v1/completions", json=BODY)).json()
        assert cold["choices"] == warm["choices"]
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        total = warm["usage"]["prompt_time"] + warm["usage"]["completion_time"]
        assert abs(warm["usage"]["total_time"] - total) < 1e-9

        streamed = await http.post("/v1/completions", json={**BODY, "stream": True})
        text = "".join(
            httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
            for line in streamed.text.splitlines()
            if line.startswith("data: {")
        )
        assert text == cold["choices"][0]["text"]

        async with grpc.aio.insecure_channel(f"127.0.0.1:{ingress.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            generation = inference_pb2.Generation(
                model="tiny", text=PROMPT, temperature=0, max_tokens=24, ignore_eos=True
            )
            whole = await stub.Generate(inference_pb2.GenerateRequest(generation=generation))
            assert whole.text == text
            assert whole.usage.completion_tokens == 24

        await every_parameter_is_the_same_whole_and_streamed(http)

        too_long = await http.post("/v1/completions", json={**BODY, "max_tokens": 10_000})
        assert too_long.status_code == 400

        with pytest.raises(httpx.ReadTimeout):
            await http.post(
                "/v1/completions",
                json={**BODY, "max_tokens": 300},
                timeout=httpx.Timeout(60, read=0.2),
            )
        await quiescent(http)
        metrics = (await http.get("/metrics")).text
        assert 'relevo_requests_finished_total{finish_reason="length"}' in metrics
        assert "relevo_kv_blocks{" in metrics
