"""The document says what the code reads, and docs/api.md says what the document does."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from api.anthropic import fields as anthropic_fields
from api.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from api.openapi.bodies import BODIES
from api.openapi.document import openapi_document
from api.openapi.reference import reference
from api.responses import fields as responses_fields
from api.token_routes import DETOKENIZE_FIELDS, TOKENIZE_FIELDS

ROOT = Path(__file__).parents[4]


def test_docs_api_is_fresh() -> None:
    assert (ROOT / "docs/api.md").read_text() == reference(), "run make docs"


@pytest.mark.parametrize(
    ("path", "served"),
    [
        ("/v1/chat/completions", CHAT_FIELDS | {"user"}),
        ("/v1/completions", COMPLETION_FIELDS | {"user"}),
        ("/v1/responses", responses_fields.FIELDS),
        ("/v1/messages", anthropic_fields.FIELDS),
        ("/v1/messages/count_tokens", anthropic_fields.COUNTED_FIELDS),
        ("/tokenize", TOKENIZE_FIELDS),
        ("/detokenize", DETOKENIZE_FIELDS),
    ],
)
def test_every_served_field_is_described(path: str, served: frozenset[str]) -> None:
    assert set(BODIES[path].properties) == served


def test_examples_match_their_schemas() -> None:
    paths: Any = openapi_document("1")["paths"]
    posts = [verbs["post"] for verbs in paths.values() if "post" in verbs]
    assert len(posts) == len(BODIES)
    for post in posts:
        content = post["requestBody"]["content"]["application/json"]
        jsonschema.validate(content["example"], content["schema"])


def test_each_status_of_the_table_is_told() -> None:
    paths: Any = openapi_document("1")["paths"]
    assert {"200", "400", "401", "404", "429", "500", "503"} <= set(
        paths["/v1/messages"]["post"]["responses"]
    )
