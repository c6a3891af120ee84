"""GPT-OSS's answers, read as openai-harmony reads them.

The samples hold texts and the messages that openai-harmony 0.0.8 found in their tokens. It cannot
run here: it loads its vocabulary over the network.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from api.parsers.part import join_parts
from api.parsers.reading import Dialect, Reading

SAMPLES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "harmony_samples.json").read_text()
)
HARMONY = Reading(dialect=Dialect.of("<|channel|>"), names={"f", "get_weather", "a-b.c"})

Told = list[tuple[str, str]]


def expected(messages: list[tuple[str, str | None, str]]) -> Told:
    """Messages as parts: neighbours of a kind are one, but for calls."""
    told: Told = []
    for channel, recipient, text in messages:
        kind = "reasoning" if channel == "analysis" else "content"
        if recipient is not None:
            told.append((recipient.removeprefix("functions."), text))
        elif told and told[-1][0] == kind:
            told[-1] = (kind, told[-1][1] + text)
        else:
            told.append((kind, text))
    return told


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_harmony_is_read_as_its_own_library_reads_it(sample: dict[str, Any], size: int) -> None:
    text, parser = sample["text"], HARMONY.new_parser()
    cuts = [*range(0, len(text), size), len(text)]
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    parts = join_parts([part for piece in pieces for part in parser.push(piece)] + parser.flush())
    told = [(part.name or part.kind.value, part.text) for part in parts]
    assert told == expected(sample["messages"])
