"""Tokens to text with stops, limits and failures, over scripted generations."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relevo.v1 import common_pb2

from api.choice_text import TextDelta
from api.detokenizer import detokenizer_factory
from api.errors import ApiError, Verdict
from api.generation_request import GenerationRequest
from api.structured_output import StructuredOutput
from api.text_stream import TextStream
from grammar.grammar import Grammar, GrammarKind
from router.errors import GenerationFailed, InvalidRequest, NeverFits
from router.request import FinishReason, RoutedRequest, TokenBatch
from tests.fake_router import FakeGeneration, Step
from tests.tiny_tokenizer import byte_level_backend

BACKEND = byte_level_backend()
FACTORY = detokenizer_factory(BACKEND)
EOS = 2


def ids_of(text: str) -> list[int]:
    return list(BACKEND.encode(text, add_special_tokens=False).ids)


class Case:
    """A text stream over a script."""

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        num_choices: int = 1,
        wanted: StructuredOutput | None = None,
    ) -> None:
        routed = RoutedRequest(
            request_id="r", token_ids=[1, 2], sampling=common_pb2.SamplingParams()
        )
        self.generation = FakeGeneration(routed, steps, step_s=0.0)
        self.num_closed = 0
        self.stream = TextStream(
            GenerationRequest(
                token_ids=[1, 2],
                max_tokens=99,
                stop=stop,
                min_tokens=min_tokens,
                num_choices=num_choices,
                num_shown_choices=num_choices,
                structured_output=wanted,
            ),
            request_id="r",
            request_label="",
            generation=self.generation,
            new_detokenizer=FACTORY,
            on_close=self._closed,
        )

    def _closed(self) -> None:
        self.num_closed += 1

    async def read(self) -> list[TextDelta]:
        return [delta async for delta in self.stream]


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[Step]]:
    """Any tokens in any batches, with either end."""
    token_ids = draw(st.lists(st.sampled_from([*ids_of("ab🦊ž\n"), 90, 200, 240]), max_size=24))
    steps: list[Step] = []
    rest = list(token_ids)
    while rest:
        size = draw(st.integers(1, 5))
        steps.append(TokenBatch(rest[:size]))
        rest = rest[size:]
    steps.append(TokenBatch([], FinishReason.LENGTH))
    return token_ids, steps


@settings(max_examples=200, deadline=None)
@given(
    case=batches(),
    stop=st.lists(st.sampled_from(["a", "ab", "b🦊", "\ufffd", "\n"]), max_size=2),
    min_tokens=st.integers(0, 6),
)
def test_batching_changes_nothing(
    case: tuple[list[int], list[Step]], stop: list[str], min_tokens: int
) -> None:
    token_ids, steps = case

    async def both() -> None:
        one_by_one: list[Step] = [TokenBatch([token_id]) for token_id in token_ids]
        one_by_one.append(TokenBatch([], FinishReason.LENGTH))
        stops = tuple(stop)
        first = Case(steps, stop=stops, min_tokens=min_tokens)
        second = Case(one_by_one, stop=stops, min_tokens=min_tokens)
        deltas, others = await first.read(), await second.read()
        assert text_of(deltas) == text_of(others)
        assert deltas[-1].finish_reason == others[-1].finish_reason
        assert first.stream.num_tokens == second.stream.num_tokens
        assert first.stream.num_tokens >= min(min_tokens, len(token_ids))
        if not stop:
            assert text_of(deltas) == BACKEND.decode(token_ids)

    asyncio.run(both())


async def test_the_stop_token_counts_but_does_not_show() -> None:
    newline = ids_of("\n")[0]
    case = Case([TokenBatch([*ids_of("ab"), newline], FinishReason.STOP)])
    deltas = await case.read()
    assert text_of(deltas) == "ab"
    assert case.stream.num_tokens == 3
    assert deltas[-1].token_ids[-1] == newline


async def test_a_stop_string_ends_the_generation_early() -> None:
    case = Case([TokenBatch(ids_of("abXcd"))], stop=("X",))
    deltas = await case.read()
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("ab", FinishReason.STOP)]
    assert deltas[0].token_ids == ids_of("abX")
    assert case.stream.num_tokens == 3
    assert case.generation.close_reason is FinishReason.STOP


async def test_a_stop_in_the_last_held_bytes_is_found() -> None:
    lead_byte = BACKEND.token_to_id("ð")
    case = Case([TokenBatch([lead_byte], FinishReason.LENGTH)], stop=("\ufffd",))
    deltas = await case.read()
    assert (text_of(deltas), deltas[-1].finish_reason) == ("", FinishReason.STOP)


async def test_held_text_shows_when_no_stop_came() -> None:
    case = Case([TokenBatch(ids_of("ab")), TokenBatch([], FinishReason.LENGTH)], stop=("bc",))
    assert text_of(await case.read()) == "ab"


@pytest.mark.parametrize("error", [GenerationFailed("x"), RuntimeError("x")])
async def test_an_error_closes_everything_once(error: Exception) -> None:
    case = Case([TokenBatch(ids_of("a")), error])
    with pytest.raises(type(error)):
        await case.read()
    assert case.generation.is_closed
    assert case.num_closed >= 1
    assert await case.read() == []


async def test_a_generation_without_an_end_is_an_error() -> None:
    case = Case([TokenBatch(ids_of("a"))])
    reading = asyncio.create_task(case.read())
    await asyncio.sleep(0.01)
    await case.generation.aclose()
    with pytest.raises(ApiError) as caught:
        await reading
    assert caught.value.verdict is Verdict.FAILED


async def test_abort_reaches_the_reader_as_a_cancel() -> None:
    case = Case([TokenBatch(ids_of("a"))])
    reading = asyncio.create_task(case.read())
    await asyncio.sleep(0.01)
    case.stream.abort(Verdict.CANCELLED, "aborted")
    case.stream.abort(Verdict.CANCELLED, "aborted")
    with pytest.raises(ApiError) as caught:
        await reading
    assert caught.value.verdict is Verdict.CANCELLED
    assert case.generation.is_closed


async def test_a_cancelled_reader_closes_the_generation() -> None:
    case = Case([])
    reading = asyncio.create_task(case.read())
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert case.generation.is_closed


async def test_a_fault_in_the_detokenizer_ends_this_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(point: str, **context: str) -> None:
        if context["request_label"] == "bad":
            raise RuntimeError(point)

    monkeypatch.setattr("api.text_stream.fault_point_async", broken)
    bad, good = Case([TokenBatch(ids_of("a"))]), Case([TokenBatch([EOS], FinishReason.STOP)])
    bad.stream._request_label = "bad"
    with pytest.raises(RuntimeError):
        await bad.read()
    assert bad.generation.is_closed
    assert (await good.read())[-1].finish_reason is FinishReason.STOP


async def test_a_stop_string_ends_its_choice_alone() -> None:
    def said(text: str, index: int, end: FinishReason | None = None) -> TokenBatch:
        return TokenBatch(ids_of(text), end, choice_index=index)

    case = Case(
        [
            said("ab", 0),
            said("aX", 1),
            said("cd", 1),  # on its way already
            said("cd", 0, FinishReason.LENGTH),
            said("b", 2),
            said("X", 2),
        ],
        stop=("X",),
        num_choices=3,
    )
    deltas = await case.read()
    texts = {i: text_of([d for d in deltas if d.choice_index == i]) for i in range(3)}
    assert texts == {0: "abcd", 1: "a", 2: "b"}
    ends = [(d.choice_index, d.finish_reason) for d in deltas if d.finish_reason is not None]
    assert ends == [(1, FinishReason.STOP), (0, FinishReason.LENGTH), (2, FinishReason.STOP)]
    # The last one's end closes the generation.
    assert case.generation.ended_choices == [1]
    assert (case.generation.close_reason, case.num_closed) == (FinishReason.STOP, 1)
    assert case.stream.num_tokens == 8


async def test_a_grammar_that_leads_nowhere_is_the_client_s_own_fault() -> None:
    wanted = StructuredOutput(
        grammar=Grammar(kind=GrammarKind.REGEX, text="a"), field="structured_outputs.regex"
    )
    case = Case([TokenBatch(ids_of("a")), InvalidRequest("too costly")], wanted=wanted)
    with pytest.raises(ApiError) as caught:
        await case.read()
    assert caught.value.face.http_status == 400
    assert caught.value.param == "structured_outputs.regex"
    assert "too costly" in caught.value.message
    with pytest.raises(NeverFits):
        await Case([NeverFits("too long")], wanted=wanted).read()
    with pytest.raises(InvalidRequest):
        await Case([InvalidRequest("something else")]).read()


@pytest.mark.parametrize(("stop", "is_gathered"), [((), True), (("x",), False)])
async def test_only_what_no_stop_string_can_end_is_gathered(
    stop: tuple[str, ...], is_gathered: bool
) -> None:
    case = Case([], stop=stop)
    case.stream.gather()
    assert (case.generation.num_gathered > 1) == is_gathered
    await case.stream.aclose()
