"""What compiles but cannot be followed is refused before anybody waits for it."""

import json
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import pytest

from grammar.compiler import CompiledGrammar, GrammarCompiler
from grammar.grammar import Grammar, GrammarError, GrammarKind
from grammar.trial import try_out
from grammar.vocabulary import Vocabulary
from tests.fakes import FakeClock
from tests.schemas import SCHEMAS
from tests.unit.grammar.conftest import schema_grammar


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_what_clients_send_passes(
    compiler: GrammarCompiler, vocabulary: Vocabulary, name: str
) -> None:
    try_out(compiler.compile(schema_grammar(SCHEMAS[name])), vocabulary.eos_token_ids)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"property {n}": {"type": "string"} for n in range(300)}},
        {"anyOf": [{"properties": {f"p{k}_{n}": {} for n in range(20)}} for k in range(15)]},
    ],
    ids=["one kind", "many kinds"],
)
def test_an_object_of_many_optional_properties_passes(
    compiler: GrammarCompiler, vocabulary: Vocabulary, schema: dict[str, object]
) -> None:
    compiled = compiler.compile(schema_grammar({"type": "object", **schema}))
    try_out(compiled, vocabulary.eos_token_ids)


def test_a_grammar_with_more_ways_than_the_library_follows_is_refused(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    """In the second token of nearly every way: it would have failed whoever used it."""
    rules = "\n".join(f"a{n}: a{(n + 1) % 90} a{(n * 7 + 3) % 90} | /[a-z]/" for n in range(90))
    compiled = compiler.compile(Grammar(kind=GrammarKind.CFG, text=f"start: a0\n{rules}"))
    with pytest.raises(GrammarError, match="make it simpler"):
        try_out(compiled, vocabulary.eos_token_ids)


class SlowMask:
    """Every mask takes its time, on a clock of the test."""

    num_tokens = 0

    def __init__(self, clock: FakeClock, cost_s: float) -> None:
        self._clock = clock
        self._cost_s = cost_s

    def advance(self, token_ids: list[int]) -> None:
        self.num_tokens += len(token_ids)

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        self._clock.advance(self._cost_s)
        return np.ones(8, dtype=np.bool_)


class SlowGrammar(CompiledGrammar):
    """Made of slow masks."""

    def __init__(self, clock: FakeClock, cost_s: float) -> None:
        self._clock = clock
        self._cost_s = cost_s

    def new_mask(self) -> SlowMask:  # type: ignore[override]
        return SlowMask(self._clock, self._cost_s)


@pytest.mark.parametrize(("cost_s", "is_refused"), [(0.015, False), (0.03, True)])
def test_one_that_the_others_would_wait_for_is_refused(cost_s: float, is_refused: bool) -> None:
    clock = FakeClock()
    grammar = SlowGrammar(clock, cost_s)
    with pytest.raises(GrammarError, match="30 ms") if is_refused else nullcontext():
        try_out(grammar, (2,), now=clock)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind=GrammarKind.CFG, text="root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        Grammar(kind=GrammarKind.REGEX, text="(a|b"),
        schema_grammar({"patternProperties": {"(a|b)$": {}, "b$": {}}}),
        schema_grammar({"type": "string", "pattern": "a|(b"}),
        Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps({"type": "wibble"})),
    ],
    ids=lambda grammar: grammar.text[:20],
)
def test_every_refusal_has_a_reason(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match=r"[a-z]{4,}"):
        compiler.compile(grammar)
