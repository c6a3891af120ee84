"""Events as bytes."""

import json

import pytest

from api import sse


@pytest.mark.parametrize("text", ["plain", "ž🦊", "a\u0085b\u2028c\u2029d", "\r\n\0\x7f", '"\\'])
def test_an_event_is_one_line_that_parses_back(text: str) -> None:
    data = sse.event({"text": text}).decode()
    assert data.endswith("\n\n")
    assert len(data.splitlines()) == 2
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize(
    "text", ["plain", "ž🦊", "a\u0085b\u2028c\u2029d", "\r\n\0\x7f", '"\\', ""]
)
def test_a_mold_gives_the_same_event(text: str) -> None:
    def value_of(text: str) -> object:
        return {"id": "text", "choices": [{"text": text, "reason": None}]}

    assert sse.EventMold(value_of).fill(text) == sse.event(value_of(text))
