"""Loading shows how far it is."""

import logging
from itertools import count

import pytest

from engine.load_progress import ProgressLines, showing_progress


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(caplog: pytest.LogCaptureFixture):
    seconds = count(0, 2)
    caplog.set_level(logging.INFO)
    lines = ProgressLines("abcdefgh", 8, name="m", now=lambda: float(next(seconds)))
    assert list(lines) == list("abcdefgh")
    assert caplog.messages == [
        "loading m: 25 % (2 of 8 tensors, 6.0 s)",
        "loading m: 62 % (5 of 8 tensors, 12.0 s)",
        "loading m: 100 % (8 of 8 tensors, 18.0 s)",
    ]


def test_what_transformers_loads_is_shown_in_our_lines(caplog: pytest.LogCaptureFixture):
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    caplog.set_level(logging.INFO)
    with showing_progress("m"):
        bar = transformers_logging.tqdm({"a": 1, "b": 2}.items(), desc="Loading weights")
        assert dict(bar) == {"a": 1, "b": 2}
    assert "loading m: 100 % (2 of 2 tensors" in caplog.text
