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
