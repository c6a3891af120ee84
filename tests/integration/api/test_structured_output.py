"""Grammars at the door: what reaches the router, and the same verdict on both faces."""

import asyncio
import json
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from pydantic import BaseModel
from relevo.v1 import common_pb2, inference_pb2

from tests.integration.api.conftest import Site, saying
from tests.schemas import REFUSED, SCHEMAS

PERSON = SCHEMAS["person"]
Choices = inference_pb2.StructuredOutputs.Choices
MESSAGES = [{"role": "user", "content": "hi"}]

GOOD: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": json.dumps(PERSON)},
    {"json_object": True},
    {"regex": "a+b"},
    {"choice": ["yes", 'n"o', "🦊"]},
    {"grammar": 'root ::= "a" | "b"'},
]


def to_message(fields: dict[str, Any]) -> inference_pb2.StructuredOutputs:
    changed = dict(fields)
    if isinstance(fields.get("json"), dict):
        changed["json"] = json.dumps(fields["json"])
    if "choice" in fields:
        changed["choice"] = Choices(texts=fields["choice"])
    return inference_pb2.StructuredOutputs(**changed)


def request_of(fields: dict[str, Any]) -> inference_pb2.GenerateRequest:
    generation = inference_pb2.Generation(
        model="tiny", text="hi", structured_outputs=to_message(fields)
    )
    return inference_pb2.GenerateRequest(generation=generation)


async def grpc_verdict(site: Site, fields: dict[str, Any]) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await site.stub.Generate(request_of(fields))
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    found = {}
    for detail in status.details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo):
            if detail.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                detail.Unpack(found[kind])
    bad = found[error_details_pb2.BadRequest]
    return caught.value.code(), bad.field_violations[0].field, bad.field_violations[0].description


async def test_both_faces_hand_the_same_grammar_on(site: Site) -> None:
    for fields in GOOD:
        body = {"model": "tiny", "prompt": "hi", "structured_outputs": fields}
        assert (await site.http.post("/v1/completions", json=body)).status_code == 200
        await site.stub.Generate(request_of(fields))
        first, second = (each.request.sampling.grammar for each in site.router.generations[-2:])
        assert first == second
        assert first.kind != common_pb2.Grammar.KIND_UNSPECIFIED
        assert first.text


async def test_what_the_official_client_makes_of_a_model_is_understood(site: Site) -> None:
    class Person(BaseModel):
        name: str
        age: int
        friends: list[str] | None = None

    site.router.script = saying('{"name": "Ada", "age": 36, "friends": null}')
    answer = await site.openai.chat.completions.parse(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        response_format=Person,
    )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    grammar = site.router.generations[0].request.sampling.grammar
    assert grammar.kind == common_pb2.Grammar.KIND_JSON_SCHEMA
    assert json.loads(grammar.text)["properties"].keys() == {"name", "age", "friends"}


async def test_a_free_text_has_no_grammar_and_starts_nothing(site: Site) -> None:
    body = {"model": "tiny", "prompt": "hi", "response_format": {"type": "text"}}
    assert (await site.http.post("/v1/completions", json=body)).status_code == 200
    assert not site.router.generations[0].request.sampling.HasField("grammar")
    assert site.ingress.serving._grammar_checker._process is None


async def test_bad_grammars_are_a_400_with_the_reason_on_both_faces(site: Site) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        *(({"json": schema}, word) for schema, word in REFUSED.values()),
        ({"json": {"type": "integer", "maximum": 2e10, "minimum": 3e10}}, "minimum"),
        ({"json": "{"}, "JSON"),
        ({"regex": "(("}, "regex"),
        ({"regex": "(?=a)b"}, "look"),
        ({"grammar": "no grammar at all"}, "::="),
        ({"grammar": "start: missing"}, "missing"),
        ({"choice": [""]}, "choice"),
        ({"choice": ["a"] * 100_000}, "1024"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "nested too deeply"),
        ({"json": '{"type": "object", "type": "string"}'}, "twice"),
        ({"json": {"patternProperties": {"(a|b)$": {}, "b$": {}}}}, "disjoint"),
        (
            {"json": {"type": "object", "properties": {str(n): {} for n in range(2000)}}},
            "items",
        ),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "match"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
        ({"json_object": False}, "exactly one"),
    ]
    for fields, word in bad:
        body = {"model": "tiny", "prompt": "hi", "structured_outputs": fields}
        response = await site.http.post("/v1/completions", json=body)
        assert response.status_code == 400, fields
        error = response.json()["error"]
        assert word in error["message"]
        assert error["param"].startswith("structured_outputs")
        code, field, message = await grpc_verdict(site, fields)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert (field, message) == (error["param"], error["message"])
    assert site.router.generations == []


async def test_a_bad_format_of_a_chat_is_a_400(site: Site) -> None:
    for schema, word in list(REFUSED.values())[:3]:
        wrapper = {"name": "x", "schema": schema, "strict": True}
        body = {
            "model": "tiny",
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": wrapper},
        }
        response = await site.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format.json_schema.schema"
        assert word in response.json()["error"]["message"]


async def test_a_grammar_that_never_ends_to_compile_holds_nobody_up(site: Site) -> None:
    endless = {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 997}]}
    body = {"model": "tiny", "prompt": "hi", "structured_outputs": {"json": endless}}
    slow = asyncio.create_task(site.http.post("/v1/completions", json=body, timeout=60))
    num_served = 0
    while not slow.done():
        answer = await site.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
        assert answer.status_code == 200
        num_served += 1
        await asyncio.sleep(0.05)
    assert (await slow).status_code == 400
    assert "takes more than 2 s" in (await slow).json()["error"]["message"]
    assert num_served >= 3
