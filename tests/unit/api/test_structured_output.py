"""The two fields that say what a text must match, judged by their form."""

import json

import pytest

from api.errors import ApiError, Verdict
from api.structured_output import read_structured_output
from grammar.grammar import MAX_GRAMMAR_BYTES, GrammarKind

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}


def own(**fields: object) -> dict[str, object]:
    return {"structured_outputs": fields}


def formatted(**fields: object) -> dict[str, object]:
    return {"response_format": fields}


def in_schema(**changes: object) -> dict[str, object]:
    wrapper = {"name": "x", "schema": SCHEMA, **changes}
    return formatted(type="json_schema", json_schema=wrapper)


@pytest.mark.parametrize(
    ("values", "kind", "text", "field"),
    [
        (own(json=SCHEMA), GrammarKind.JSON_SCHEMA, SCHEMA, "structured_outputs.json"),
        (own(json=json.dumps(SCHEMA)), GrammarKind.JSON_SCHEMA, SCHEMA, "structured_outputs.json"),
        (own(json=None, json_object=True), GrammarKind.JSON_SCHEMA, {"type": "object"}, None),
        (own(regex="a+", json_object=False), GrammarKind.REGEX, "a+", "structured_outputs.regex"),
        (own(choice=["a", "é"]), GrammarKind.CHOICE, ["a", "é"], "structured_outputs.choice"),
        (own(grammar='start: "a"'), GrammarKind.CFG, 'start: "a"', "structured_outputs.grammar"),
        (formatted(type="json_object"), GrammarKind.JSON_SCHEMA, {"type": "object"}, None),
        (in_schema(), GrammarKind.JSON_SCHEMA, SCHEMA, "response_format.json_schema.schema"),
        (in_schema(strict=True), GrammarKind.JSON_SCHEMA, SCHEMA, None),
        (in_schema(strict=None, description="d"), GrammarKind.JSON_SCHEMA, SCHEMA, None),
        ({**in_schema(), "structured_outputs": None}, GrammarKind.JSON_SCHEMA, SCHEMA, None),
        ({**own(regex="a"), "response_format": {"type": "text"}}, GrammarKind.REGEX, "a", None),
    ],
)
def test_each_form_is_read(
    values: dict[str, object], kind: GrammarKind, text: object, field: str | None
) -> None:
    wanted = read_structured_output(values)
    assert wanted is not None
    assert wanted.grammar.kind is kind
    is_json = kind in {GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE}
    assert (json.loads(wanted.grammar.text) if is_json else wanted.grammar.text) == text
    if is_json and isinstance(text, dict):
        # The order of a schema's properties is that of the output's.
        assert list(json.loads(wanted.grammar.text)) == list(text)
    assert field in {None, wanted.field}


@pytest.mark.parametrize(
    "values", [{}, {"response_format": None, "structured_outputs": None}, formatted(type="text")]
)
def test_a_text_may_be_free(values: dict[str, object]) -> None:
    assert read_structured_output({**values, "ignore_eos": True}) is None


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": []}, "response_format"),
        (formatted(), "response_format.type"),
        (formatted(type="xml"), "response_format.type"),
        (formatted(type=["text"]), "response_format.type"),
        (formatted(type="structural_tag"), "response_format.type"),
        (formatted(type="json_schema"), "response_format.json_schema"),
        (formatted(type="json_schema", schema=SCHEMA), "response_format.json_schema"),
        (formatted(type="json_schema", json_schema=[]), "response_format.json_schema"),
        (in_schema(name=None), "response_format.json_schema.name"),
        (in_schema(name="a b"), "response_format.json_schema.name"),
        (in_schema(name="x" * 65), "response_format.json_schema.name"),
        (in_schema(strict="yes"), "response_format.json_schema.strict"),
        (in_schema(schema=None), "response_format.json_schema.schema"),
        (in_schema(schema=True), "response_format.json_schema.schema"),
        (in_schema(schema="{}"), "response_format.json_schema.schema"),
        (
            in_schema(schema={"enum": ["x" * MAX_GRAMMAR_BYTES]}),
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": "a+"}, "structured_outputs"),
        (own(), "structured_outputs"),
        (own(json=None), "structured_outputs"),
        (own(regex="a", choice=["b"]), "structured_outputs"),
        ({**own(regex="a"), **in_schema()}, "structured_outputs"),
        (own(structural_tag={}), "structured_outputs.structural_tag"),
        (own(regex="a", whitespace_pattern=" "), "structured_outputs.whitespace_pattern"),
        (own(json="{"), "structured_outputs.json"),
        (own(json="[]"), "structured_outputs.json"),
        (own(json="[" * 100_000), "structured_outputs.json"),
        (own(json=5), "structured_outputs.json"),
        (own(json_object=1), "structured_outputs.json_object"),
        (own(json_object="true"), "structured_outputs.json_object"),
        (own(regex=""), "structured_outputs.regex"),
        (own(regex=5), "structured_outputs.regex"),
        (own(regex="a" * (MAX_GRAMMAR_BYTES + 1)), "structured_outputs.regex"),
        (own(grammar=[]), "structured_outputs.grammar"),
        (own(choice=[]), "structured_outputs.choice"),
        (own(choice="a"), "structured_outputs.choice"),
        (own(choice=["a", 1]), "structured_outputs.choice"),
        (own(choice=["a", ""]), "structured_outputs.choice"),
        (own(choice=["a"] * 1025), "structured_outputs.choice"),
        ({**own(regex="a"), "ignore_eos": True}, "ignore_eos"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_form_is_a_400_that_names_the_field(values: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_structured_output(values)
    assert caught.value.face.http_status == 400
    assert caught.value.param == param
    assert param in caught.value.message


def test_what_is_known_but_not_served_says_so() -> None:
    with pytest.raises(ApiError) as caught:
        read_structured_output(own(structural_tag={"a": 1}))
    assert caught.value.verdict is Verdict.UNSUPPORTED
