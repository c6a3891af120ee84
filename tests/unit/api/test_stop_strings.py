"""Stop strings over every way a text can be cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.stop_strings import StopStrings

LETTERS = st.text(alphabet="abc", max_size=24)


def run(stops: list[str], parts: list[str]) -> tuple[str, bool, list[str]]:
    filter_ = StopStrings(stops)
    shown: list[str] = []
    for part in parts:
        shown.append(filter_.push(part))
        if filter_.stopped:
            return "".join(shown), True, shown
    shown.append(filter_.flush())
    return "".join(shown), False, shown


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """The slow truth: letter by letter, the first stop that is complete."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@st.composite
def cut_text(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(LETTERS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    return text, [text[a:b] for a, b in pairwise(cuts)]


@settings(max_examples=600, deadline=None)
@given(
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    cut=cut_text(),
)
def test_the_result_does_not_depend_on_the_pieces(
    stops: list[str], cut: tuple[str, list[str]]
) -> None:
    text, parts = cut
    shown, stopped, _ = run(stops, parts)
    assert (shown, stopped) == expected(stops, text)


def test_a_stop_over_several_tokens_never_shows_its_beginning() -> None:
    assert run(["EFGH"], ["D", "EF", "G", "H"]) == ("D", True, ["D", "", "", ""])


def test_a_held_beginning_is_released_when_it_does_not_match() -> None:
    assert run(["EFGH"], ["D", "EF", "G", "X"])[2] == ["D", "", "", "EFGX", ""]


def test_a_stop_inside_a_token_cuts_it() -> None:
    assert run(["DE"], ["DEF"]) == ("", True, [""])


def test_a_held_beginning_shows_at_the_end() -> None:
    assert run(["EFGH"], ["DEF"]) == ("DEF", False, ["D", "EF"])


def test_without_stops_all_text_passes_at_once() -> None:
    assert run([], ["a", "b"])[2] == ["a", "b", ""]


@pytest.mark.parametrize("stop", ["\0", "\n", "🦊"])
def test_odd_stop_strings_work(stop: str) -> None:
    assert run([stop], [f"a{stop}b"]) == ("a", True, ["a"])
