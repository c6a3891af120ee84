"""The gRPC face: every rpc, rich errors, health, reflection, and the same verdicts as HTTP."""

import asyncio
import math

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from relevo.v1 import common_pb2, inference_pb2

from api.errors import Verdict
from router.errors import GenerationFailed, NoWorkers, QueueFull
from tests.integration.api.conftest import ANSWER, Site, open_site, saying, tokens_of
from tests.patience import comes_true

Generation = inference_pb2.Generation
SERVICE = "relevo.v1.InferenceService"


def generate(**fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(generation=Generation(**{"model": "tiny", **fields}))  # type: ignore[arg-type]


async def failure(call: grpc.aio.UnaryUnaryCall) -> grpc.aio.AioRpcError:  # type: ignore[type-arg]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> dict[str, object]:
    status = rpc_status.from_call(error)
    assert status is not None
    kinds = (
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
        error_details_pb2.RequestInfo,
    )
    found: dict[str, object] = {}
    for detail in status.details:
        for kind in kinds:
            if detail.Is(kind.DESCRIPTOR):
                message = kind()
                detail.Unpack(message)
                found[kind.DESCRIPTOR.name] = message
    return found


@pytest.mark.parametrize("prompt", [{"text": "hi"}, {"token_ids": {"ids": [5, 6]}}], ids=repr)
async def test_generate_gives_text_ids_and_usage(site: Site, prompt: dict[str, object]) -> None:
    call = site.stub.Generate(generate(**prompt), metadata=(("x-request-id", "label"),))
    response = await call
    assert response.text == ANSWER
    assert list(response.token_ids) == [*tokens_of(ANSWER), 2]
    assert response.finish_reason == common_pb2.FINISH_REASON_STOP
    assert response.usage.completion_tokens == len(response.token_ids)
    total = response.usage.prompt_time_s + response.usage.completion_time_s
    assert abs(response.usage.total_time_s - total) < 1e-9
    assert ("x-request-id", "label") in list(await call.initial_metadata())
    assert site.router.generations[0].request.request_label == "label"


async def test_generate_stream_gives_the_same(site: Site) -> None:
    whole = await site.stub.Generate(generate(text="hi"))
    request = inference_pb2.GenerateStreamRequest(generation=generate(text="hi").generation)
    messages = [message async for message in site.stub.GenerateStream(request)]
    assert "".join(message.text for message in messages) == whole.text
    assert [i for message in messages for i in message.token_ids] == list(whole.token_ids)
    assert [message.finish_reason for message in messages[:-1]] == [0] * (len(messages) - 1)
    assert messages[-1].finish_reason == whole.finish_reason
    assert messages[-1].usage == whole.usage
    assert not any(message.HasField("usage") for message in messages[:-1])


async def test_every_parameter_reaches_the_router(site: Site) -> None:
    request = generate(
        text="hi",
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        seed=-5,
        max_tokens=7,
        min_tokens=2,
        stop_token_ids=[9],
        ignore_eos=True,
        cache_salt="salt",
        priority=-3,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={5: 2.0},
        bad_words=["no"],
        allowed_token_ids=[5, 9],
        logprobs=0,
        prompt_logprobs=2,
    )
    await site.stub.Generate(request)
    routed = site.router.generations[0].request
    sampling = routed.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.5)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-5, 7, 2)
    assert (list(sampling.stop_token_ids), sampling.ignore_eos) == ([9], True)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, -0.5)
    assert (sampling.frequency_penalty, dict(sampling.logit_bias)) == (0.25, {5: 2.0})
    words = [list(word.token_ids) for word in sampling.bad_words]
    assert words == [tokens_of("no"), tokens_of(" no")]
    assert list(sampling.allowed_token_ids) == [5, 9]
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (0, 2)
    assert (routed.cache_salt, routed.priority) == ("salt", -3)


async def test_a_zero_is_not_a_default(site: Site) -> None:
    await site.stub.Generate(generate(text="hi", temperature=0.0, seed=0))
    assert site.router.generations[0].request.sampling.temperature == 0.0
    error = await failure(site.stub.Generate(generate(text="hi", max_tokens=0)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


SAME: list[dict[str, object]] = [
    {"text": "hi", "temperature": 3.0},
    {"text": "hi", "temperature": float("nan")},
    {"text": "hi", "top_p": 0.0},
    {"text": "hi", "top_k": -2},
    {"text": "hi", "min_p": float("inf")},
    {"text": "hi", "max_tokens": 0},
    {"text": "hi", "max_tokens": 300},
    {"text": "hi", "min_tokens": 300},
    {"text": "hi", "stop": [""]},
    {"text": "hi", "stop": ["a"] * 5},
    {"text": "hi", "stop_token_ids": [99999]},
    {"text": "hi", "stop_token_ids": [-1]},
    {"text": "hi", "cache_salt": ""},
    {"text": "hi", "repetition_penalty": 0.0},
    {"text": "hi", "presence_penalty": float("nan")},
    {"text": "hi", "frequency_penalty": 2.5},
    {"text": "hi", "logit_bias": {99999: 5.0}},
    {"text": "hi", "logit_bias": {-1: 5.0}},
    {"text": "hi", "logit_bias": {5: float("inf")}},
    {"text": "hi", "bad_words": [""]},
    {"text": "hi", "allowed_token_ids": [99999]},
    {"text": "hi", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
    {"text": "hi", "logprobs": -1},
    {"text": "hi", "prompt_logprobs": 21},
    {"text": ""},
    {"text": "x" * 100_000},
    {"token_ids": {"ids": []}},
    {"token_ids": {"ids": [99999]}},
    {"token_ids": {"ids": [1] * 256}},
    {"model": "nope", "text": "hi"},
    {"model": "", "text": "hi"},
    {},
    {"text": "hi", "max_tokens": 5},
    {"text": "a\0b"},
]


def as_json(value: object) -> object:
    """The same in JSON, which has no number that is not finite."""
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else 1e308
    return value


@pytest.mark.parametrize("fields", SAME, ids=lambda fields: repr(fields)[:60])
async def test_both_faces_give_the_same_verdict(site: Site, fields: dict[str, object]) -> None:
    body = {"model": "tiny", **{name: as_json(value) for name, value in fields.items()}}
    if "text" in body:
        body["prompt"] = body.pop("text")
    if "token_ids" in body:
        body["prompt"] = body.pop("token_ids")["ids"]  # type: ignore[index]
    response = await site.http.post("/v1/completions", json=body)
    try:
        await site.stub.Generate(generate(**fields))
    except grpc.aio.AioRpcError as error:
        code, param = error.code(), response.json()["error"]["param"]
        violations = details_of(error).get("BadRequest")
        assert violations is None or violations.field_violations[0].field == param  # type: ignore[attr-defined]
    else:
        code = grpc.StatusCode.OK
    expected = {
        verdict.value.http_status: verdict.value.grpc_code
        for verdict in (Verdict.INVALID, Verdict.MODEL_NOT_FOUND)
    } | {200: grpc.StatusCode.OK}
    assert code is expected[response.status_code]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("full", 3.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (NoWorkers("none", 3.5), grpc.StatusCode.UNAVAILABLE),
        (GenerationFailed("/home/secret"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_failures_are_rich_statuses(
    site: Site, error: Exception, code: grpc.StatusCode
) -> None:
    site.router.script = lambda _: [error]
    status = await failure(
        site.stub.Generate(generate(text="hi"), metadata=(("x-request-id", "mine"),))
    )
    assert status.code() is code
    assert "secret" not in (status.details() or "")
    details = details_of(status)
    assert details["ErrorInfo"].domain == "relevo"  # type: ignore[attr-defined]
    assert details["RequestInfo"].request_id == "mine"  # type: ignore[attr-defined]
    if code is not grpc.StatusCode.INTERNAL:
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == 3500  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Chat", "Tokenize"])
@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\x0a"]
)
async def test_what_is_no_request_is_the_clients_fault(
    site: Site, method: str, data: bytes
) -> None:
    call = site.channel.unary_unary(f"/relevo.v1.InferenceService/{method}")(data)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be read" in str(caught.value.details())


async def test_an_error_in_a_stream_is_its_status(site: Site) -> None:
    site.router.script = lambda request: [*saying("ab", end=None)(request), RuntimeError("x")]
    call = site.stub.GenerateStream(
        inference_pb2.GenerateStreamRequest(generation=generate(text="hi").generation)
    )
    assert (await call.read()).text == "a"
    assert (await call.read()).text == "b"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_cancel_closes_the_generation(site: Site, is_stream: bool) -> None:
    site.router.script = saying("ab", end=None)
    request = generate(text="hi")
    if is_stream:
        call = site.stub.GenerateStream(
            inference_pb2.GenerateStreamRequest(generation=request.generation)
        )
        await call.read()
    else:
        call = site.stub.Generate(request)
        await site.router.started.wait()
    call.cancel()
    await asyncio.wait_for(site.router.generations[0].closed.wait(), 30)
    assert await comes_true(lambda: site.ingress.serving.num_running == 0, 5.0)


async def test_a_deadline_reaches_the_router_and_closes_the_generation(site: Site) -> None:
    site.router.script = saying("", end=None)
    error = await failure(site.stub.Generate(generate(text="hi"), timeout=1.0))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    generation = site.router.generations[0]
    assert 0 < (generation.request.timeout_s or 0) <= 1.0
    await asyncio.wait_for(generation.closed.wait(), 30)


async def test_abort_ends_a_running_request(site: Site) -> None:
    site.router.script = saying("ab", end=None)
    call = site.stub.GenerateStream(
        inference_pb2.GenerateStreamRequest(generation=generate(text="hi").generation)
    )
    first = await call.read()
    await call.read()
    abort = inference_pb2.AbortRequest(request_id=first.request_id)
    assert (await site.stub.Abort(abort)).aborted
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert site.router.generations[0].is_closed
    assert not (await site.stub.Abort(abort)).aborted


async def test_tokenize_and_detokenize(site: Site) -> None:
    ids = await site.stub.Tokenize(inference_pb2.TokenizeRequest(model="tiny", text=ANSWER))
    assert (list(ids.token_ids), ids.max_model_len) == (tokens_of(ANSWER), 256)
    back = await site.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids.token_ids))
    assert back.text == ANSWER
    wrong = inference_pb2.DetokenizeRequest(token_ids=[99999])
    error = await failure(site.stub.Detokenize(wrong))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    unknown = inference_pb2.TokenizeRequest(model="x", text="a")
    assert (await failure(site.stub.Tokenize(unknown))).code() is grpc.StatusCode.NOT_FOUND


async def test_models_and_load(site: Site) -> None:
    models = await site.stub.ListModels(inference_pb2.ListModelsRequest())
    info = await site.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert list(models.models) == [info.model_info]
    assert info.model_info.max_model_len == 256
    assert info.model_info.dtype == "float32"
    load = await site.stub.GetLoad(inference_pb2.GetLoadRequest())
    assert load.workers[0].worker.worker_id == "decode-0"
    assert load.workers[0].load.blocks.free == 10


async def test_health_follows_the_router(site: Site) -> None:
    stub = health_pb2_grpc.HealthStub(site.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    watches = [
        stub.Watch(health_pb2.HealthCheckRequest(service=service)) for service in ("", SERVICE)
    ]
    for watch in watches:
        assert (await watch.read()).status == serving
    site.router.ready = False
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == not_serving
    for watch in watches:
        assert (await asyncio.wait_for(watch.read(), 30)).status == not_serving
        watch.cancel()
    error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="nope")))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def reflected(site: Site) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(site.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    response = await call.read()
    return {service.name for service in response.list_services_response.service}


async def test_reflection_lists_our_services(site: Site) -> None:
    assert {SERVICE, "grpc.health.v1.Health"} <= await reflected(site)


async def test_a_ten_megabyte_request_is_heard(site: Site) -> None:
    error = await failure(site.stub.Generate(generate(text="x" * 10_000_000)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


BAD_KEYS: list[tuple[tuple[str, str], ...]] = [
    (),
    (("authorization", "Bearer sk-wrong"),),
    (("authorization", "Bearer sk-righ"),),
    (("authorization", "Bearer sk-right "),),
    (("authorization", "bearer sk-right"),),
    (("authorization", "sk-right"),),
    (("x-api-key", "sk-right"),),
    (("authorization", "Bearer sk-right"), ("authorization", "Bearer sk-right")),
]


def served_methods() -> list[str]:
    """Every method of every service that our own protos and the running server know."""
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    ours = [f"/{service.full_name}/{method.name}" for method in service.methods]
    assert len(ours) >= 8
    others = ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
    spellings = ["/relevo.v1.InferenceService/Nope", "/x/y", "/grpc.health.v1.health/Check"]
    spellings += ["//grpc.health.v1.Health/Check", "/grpc.health.v1.Health.Generate/Check"]
    return ours + others + spellings


async def test_keys_guard_every_method_but_health(locked_site: Site) -> None:
    for method in served_methods():
        for metadata in BAD_KEYS:
            call = locked_site.channel.unary_unary(method)(b"", metadata=metadata)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, (method, metadata)
        good = (("authorization", "Bearer sk-right"),)
        call = locked_site.channel.unary_unary(method)(b"", metadata=good)
        assert await call.code() is not grpc.StatusCode.UNAUTHENTICATED, method
    health = health_pb2_grpc.HealthStub(locked_site.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1


async def test_reflection_is_off_with_keys_unless_asked_for(
    locked_site: Site, model_path, tokenizer, keys_file
) -> None:  # type: ignore[no-untyped-def]
    assert not locked_site.ingress.serving.config.has_reflection
    async with open_site(
        model_path, tokenizer, api_keys_file=str(keys_file), reflection=True
    ) as site:
        assert site.ingress.serving.config.has_reflection
        # Nothing is sent: a refusal that comes before the request would make the sending fail.
        call = reflection_pb2_grpc.ServerReflectionStub(site.channel).ServerReflectionInfo()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_channelz_is_there_when_asked_for(
    site: Site, model_path, tokenizer, keys_file
) -> None:  # type: ignore[no-untyped-def]
    request = channelz_pb2.GetServersRequest()
    error = await failure(channelz_pb2_grpc.ChannelzStub(site.channel).GetServers(request))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    async with open_site(
        model_path, tokenizer, api_keys_file=str(keys_file), channelz=True
    ) as locked:
        stub = channelz_pb2_grpc.ChannelzStub(locked.channel)
        assert (await failure(stub.GetServers(request))).code() is grpc.StatusCode.UNAUTHENTICATED
        good = (("authorization", "Bearer sk-right"),)
        servers = (await stub.GetServers(request, metadata=good)).server
        assert any(each.data.calls_started > 0 for each in servers)
