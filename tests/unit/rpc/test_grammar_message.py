"""A grammar on its way to its request."""

import pytest
from relevo.v1 import common_pb2

from engine.request import Request
from engine.sampling.params import SamplingParams
from grammar.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarError, GrammarKind
from rpc.errors import InvalidRequestError
from rpc.grammar_message import attach_grammar, from_proto, to_proto


def in_params(message: common_pb2.Grammar) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(grammar=message)


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_grammar_survives_the_way(kind: GrammarKind) -> None:
    grammar = Grammar(kind=kind, text="wörd\0")
    assert from_proto(in_params(to_proto(grammar))) == grammar


@pytest.mark.parametrize(
    "message",
    [
        common_pb2.Grammar(text="a"),
        common_pb2.Grammar(kind=99, text="a"),  # type: ignore[arg-type]
        common_pb2.Grammar(kind=common_pb2.Grammar.KIND_REGEX, text="a" * (MAX_GRAMMAR_BYTES + 1)),
    ],
    ids=["no kind", "unknown kind", "too large"],
)
def test_a_message_that_makes_no_sense_is_refused(message: common_pb2.Grammar) -> None:
    with pytest.raises(InvalidRequestError):
        from_proto(in_params(message))


class FakeGrammars:
    """Compiles everything but the word bad."""

    def __init__(self) -> None:
        self.asked: list[Grammar] = []

    async def get(self, grammar: Grammar) -> "FakeGrammars":
        self.asked.append(grammar)
        if grammar.text == "bad":
            raise GrammarError("it is bad")
        return self

    def new_mask(self) -> None:
        """What the request shall have."""


def make_request() -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(request_id="r", token_ids=[1], num_prompt_tokens=1, sampling_params=params)


async def test_a_request_gets_what_was_compiled() -> None:
    request, grammars = make_request(), FakeGrammars()
    await attach_grammar(request, common_pb2.SamplingParams(), grammars)  # type: ignore[arg-type]
    assert request.new_token_mask is None
    assert grammars.asked == []
    good = Grammar(kind=GrammarKind.CHOICE, text='["a"]')
    await attach_grammar(request, in_params(to_proto(good)), grammars)  # type: ignore[arg-type]
    assert request.new_token_mask == grammars.new_mask
    assert grammars.asked == [good]


async def test_a_bad_grammar_is_an_invalid_request() -> None:
    bad = in_params(to_proto(Grammar(kind=GrammarKind.REGEX, text="bad")))
    with pytest.raises(InvalidRequestError, match="it is bad"):
        await attach_grammar(make_request(), bad, FakeGrammars())  # type: ignore[arg-type]
