"""Whatever a client asks for: the same verdict on both faces, and never the server's fault."""

import math
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st
from relevo.v1 import inference_pb2

from api.openai.fields import COMPLETION_FIELDS, HARMLESS_FIELDS, UNSERVED_FIELDS
from tests.properties.client import Answer
from tests.properties.conftest import Cluster
from tests.properties.requests import bodies
from tests.tiny_tokenizer import byte_level_backend

Body = dict[str, Any]

CANARY: Body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
NUMBERS = st.sampled_from([0, 1, -1, 2, 5, 100, 319, 320, 2**31 - 1, -(2**31)])
FRACTIONS = st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -2.0, 100.0, 1e308, -1e-9, 1e-40])
FRACTIONS |= st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = NUMBERS | st.integers(-(2**31), 2**31 - 1)
VALUES_BY_TYPE: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_DOUBLE: FRACTIONS,
    FieldDescriptor.TYPE_INT32: INTEGERS,
    FieldDescriptor.TYPE_INT64: INTEGERS | st.sampled_from([2**63 - 1, -(2**63)]),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=3) | st.sampled_from(["", "a\0b", "x" * 300]),
}
# Those that are the same field with the same meaning on both faces.
SHARED = [
    field
    for field in inference_pb2.Generation.DESCRIPTOR.fields
    if field.name in COMPLETION_FIELDS - {"model", "logprobs"} and field.type in VALUES_BY_TYPE
]
ANY_JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | FRACTIONS | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NAMES = sorted(COMPLETION_FIELDS | HARMLESS_FIELDS | set(UNSERVED_FIELDS))


@st.composite
def shared_fields(draw: st.DrawFn) -> Body:
    fields = draw(st.lists(st.sampled_from(SHARED), min_size=1, max_size=3, unique=True))
    values: Body = {}
    for field in fields:
        one = VALUES_BY_TYPE[field.type]
        # An empty list of a message is an absent one.
        many = st.lists(one, min_size=1, max_size=5)
        values[field.name] = draw(many if field.is_repeated else one)
    return values


@settings(max_examples=40, deadline=None)
@given(values=shared_fields())
def test_http_and_grpc_judge_alike(cluster: Cluster, values: Body) -> None:
    values = {"max_tokens": 2, **values}
    if values["max_tokens"] > 50:
        # Refused, not generated to the end; gRPC has no number beyond the last one.
        values["max_tokens"] = min(values["max_tokens"] + 1000, 2**31 - 1)
    over_http = cluster.alone.post({"prompt": [5, 6, 7], **values})
    over_grpc = cluster.alone.status({"token_ids": {"ids": [5, 6, 7]}, **values})
    assert over_http.status_code == over_grpc, (values, over_http.text)
    assert over_grpc in {200, 400}


@pytest.fixture(scope="module")
def canary(cluster: Cluster) -> Answer:
    return cluster.alone.complete(CANARY)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"model", *CANARY}))
def test_null_is_the_same_as_absent(cluster: Cluster, canary: Answer, name: str) -> None:
    assert cluster.alone.complete({**CANARY, name: None}) == canary


@settings(max_examples=5, deadline=None)
@given(body=bodies(), names=st.sets(st.sampled_from(sorted(set(NAMES) - {"model", "prompt"}))))
def test_many_nulls_are_the_same_as_absent(cluster: Cluster, body: Body, names: set[str]) -> None:
    assert cluster.alone.complete({**dict.fromkeys(names), **body}) == cluster.alone.complete(body)


@settings(max_examples=60, deadline=None)
@given(values=st.dictionaries(st.sampled_from(NAMES), ANY_JSON, min_size=1, max_size=3))
def test_a_clients_fault_is_never_the_servers(cluster: Cluster, values: Body) -> None:
    body = {**CANARY, **values, "stream": False}
    response = cluster.handed_over.post(body)
    assert response.status_code < 500, (values, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"]
        assert len(response.content) <= 16 * 1024


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_json_has_no_such_number(cluster: Cluster, number: str) -> None:
    for name in ("temperature", "top_p", "min_p", "top_k", "seed", "max_tokens", "priority"):
        data = f'{{"model": "tiny", "prompt": [5], "{name}": {number}}}'
        assert cluster.alone.http.post("/v1/completions", content=data).status_code == 400


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_grpc_numbers_must_be_finite(cluster: Cluster, number: float) -> None:
    for field in SHARED:
        if field.type == FieldDescriptor.TYPE_DOUBLE and not field.is_repeated:
            assert cluster.alone.status({"token_ids": {"ids": [5]}, field.name: number}) == 400


@pytest.mark.parametrize("pattern", ["zzz", "aaz"])
def test_a_grammar_that_other_wishes_bar_is_a_400_wherever_it_shows(
    cluster: Cluster, canary: Answer, pattern: str
) -> None:
    """At the prompt's worker or at the one that goes on; the neighbours hear nothing of it."""
    field = "structured_outputs.regex"
    allowed = byte_level_backend().encode("a", add_special_tokens=False).ids
    wishes = {"structured_outputs": {"regex": pattern}, "allowed_token_ids": allowed}
    for client in cluster.both:
        assert client.beside(CANARY, [{**CANARY, **wishes, "ignore_eos": False}] * 2) == canary
        response = client.post({**CANARY, **wishes, "ignore_eos": False})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field
        assert field in response.json()["error"]["message"]
        assert client.status({"token_ids": {"ids": [5, 6, 7]}, **wishes}) == 400
        client.wait_until_quiet()


@settings(max_examples=6, deadline=None)
@given(
    values=st.lists(
        st.dictionaries(st.sampled_from(NAMES), ANY_JSON, min_size=1, max_size=3), min_size=3
    )
)
def test_bad_neighbours_change_nothing(
    cluster: Cluster, canary: Answer, values: list[Body]
) -> None:
    others = [{**CANARY, **bad, "stream": False} for bad in values]
    assert cluster.handed_over.beside(CANARY, others) == canary
