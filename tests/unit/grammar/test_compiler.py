"""What a mask allows, against other judges: a regex engine and a JSON-schema validator."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import regex
from tokenizers import Tokenizer

from grammar.compiler import CompiledGrammar, GrammarCompiler
from grammar.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarError, GrammarKind
from grammar.vocabulary import Vocabulary, load_vocabulary
from tests.schemas import REFUSED, SCHEMAS
from tests.tiny_tokenizer import EOS_TOKEN_ID, byte_fallback_backend
from tests.unit.grammar.conftest import DEMO_MODEL, schema_grammar, walk

Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    return Tokenizer.from_str(vocabulary.tokenizer_json)


@pytest.fixture(scope="module")
def encode(tokenizer: Tokenizer) -> Encode:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def accepts(compiled: CompiledGrammar, token_ids: list[int]) -> bool:
    """Whether the tokens, and then the end, are allowed one by one."""
    mask = compiled.new_mask()
    for token_id in [*token_ids, EOS_TOKEN_ID]:
        if not mask.allowed_tokens()[token_id]:
            return False
        if token_id != EOS_TOKEN_ID:
            mask.advance([token_id])
    return True


@pytest.mark.parametrize(
    "pattern", ["a+b", "(the|then|there) quick", "[0-9]{2,4}-[a-f]*", "x?y?z?", "The .* dog[.]"]
)
def test_every_mask_is_what_a_regex_engine_says_of_each_token(
    compiler: GrammarCompiler, tokenizer: Tokenizer, vocabulary: Vocabulary, pattern: str
) -> None:
    # Otherwise a text that must come is allowed in its usual tokens only, not in every cut of it.
    text = f'%llguidance {{"no_forcing": true}}\nstart: /{pattern}/'
    compiled = compiler.compile(Grammar(kind=GrammarKind.CFG, text=text))
    usual = compiler.compile(Grammar(kind=GrammarKind.REGEX, text=pattern)).new_mask()
    # Not the added ones, which are no text to a grammar: the same text has other tokens.
    texts = {
        token_id: text
        for token_id in range(3, tokenizer.get_vocab_size(with_added_tokens=False))
        if (text := tokenizer.decode([token_id], skip_special_tokens=False)).isascii()
    }
    judge = regex.compile(pattern)
    rng = random.Random(pattern)
    mask, so_far = compiled.new_mask(), ""
    for _ in range(12):
        allowed = mask.allowed_tokens()
        for token_id, text in texts.items():
            is_possible = judge.fullmatch(so_far + text, partial=True) is not None
            assert allowed[token_id] == is_possible, (so_far, text)
        assert allowed[EOS_TOKEN_ID] == (judge.fullmatch(so_far) is not None)
        assert not (usual.allowed_tokens() & ~allowed).any()
        assert usual.allowed_tokens().any()
        going_on = [n for n in allowed.nonzero()[0].tolist() if n in texts]
        if not going_on:
            break
        token_id = rng.choice(going_on)
        for each in (mask, usual):
            each.advance([token_id])
        so_far += texts[token_id]


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_parses_and_is_valid(
    compiler: GrammarCompiler, tokenizer: Tokenizer, vocabulary: Vocabulary, name: str
) -> None:
    compiled = compiler.compile(schema_grammar(SCHEMAS[name]))
    validator = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.FormatChecker()
    )
    num_ended = 0
    for seed in range(20):
        taken = walk(compiled, random.Random(seed), vocabulary.eos_token_ids, most=400)
        if taken is None:
            continue
        num_ended += 1
        validator.validate(json.loads(tokenizer.decode(taken, skip_special_tokens=False)))
    assert num_ended >= 3


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    compiler: GrammarCompiler, name: str
) -> None:
    schema, word = REFUSED[name]
    with pytest.raises(GrammarError) as caught:
        compiler.compile(schema_grammar(schema))
    assert word in str(caught.value)
    assert len(str(caught.value)) <= 500


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "(("),
        (GrammarKind.REGEX, "(a)\\1"),
        (GrammarKind.REGEX, "\\bword"),
        (GrammarKind.CFG, "garbage"),
        (GrammarKind.CFG, ""),
        (GrammarKind.CFG, "start: missing"),
        (GrammarKind.CFG, "start: start start"),
        (GrammarKind.CFG, "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        (GrammarKind.JSON_SCHEMA, "true"),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 2000 + "{}" + "}" * 2000),
    ],
    ids=lambda value: str(value)[:24],
)
def test_other_bad_grammars_are_refused(
    compiler: GrammarCompiler, kind: GrammarKind, text: str
) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(Grammar(kind=kind, text=text))


def test_a_grammar_has_a_largest_size() -> None:
    Grammar(kind=GrammarKind.REGEX, text="a" * MAX_GRAMMAR_BYTES)
    with pytest.raises(GrammarError, match="limit"):
        Grammar(kind=GrammarKind.REGEX, text="é" * (MAX_GRAMMAR_BYTES // 2 + 1))


CHOICES = [
    "yes",
    "no",
    'a"b',
    "a\\b",
    "a\nb",
    "\x00",
    "\x7f",
    "🦊 wörld",
    "{{x}}",
    "%json",
    " ",
    "nope",
]


def test_of_choices_exactly_these_are_allowed(compiler: GrammarCompiler, encode: Encode) -> None:
    compiled = compiler.compile(Grammar(kind=GrammarKind.CHOICE, text=json.dumps(CHOICES)))
    for choice in CHOICES:
        assert accepts(compiled, encode(choice)), choice
    for other in ["", "ye", "yess", "maybe", '"yes"']:
        assert not accepts(compiled, encode(other)), other


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ('root ::= ("yes" | "no") [0-9]+', "yes42", "maybe"),
        ('start: greeting " " NAME\ngreeting: "hi" | "yo"\nNAME: /[a-z]+/', "yo fox", "yo Fox"),
        ('start: "(" start ")" | "x"', "((x))", "((x)"),
    ],
)
def test_both_ways_to_write_a_grammar_are_read(
    compiler: GrammarCompiler, encode: Encode, text: str, right: str, wrong: str
) -> None:
    compiled = compiler.compile(Grammar(kind=GrammarKind.CFG, text=text))
    assert accepts(compiled, encode(right))
    assert not accepts(compiled, encode(wrong))


def test_whitespace_is_free_but_bounded(compiler: GrammarCompiler, encode: Encode) -> None:
    compiled = compiler.compile(schema_grammar({"type": "object"}))
    value = {"a": [1, {"b": None}], "c": "x"}
    for text in (
        json.dumps(value),
        json.dumps(value, indent=4),
        json.dumps(value, separators=(",", ":")),
    ):
        assert accepts(compiled, encode(text)), text
    assert not accepts(compiled, encode('{"a":\n\n\n1}'))
    assert not accepts(compiled, encode(" {}"))


def test_rows_beyond_the_tokenizer_are_never_allowed(vocabulary: Vocabulary) -> None:
    padded = replace(vocabulary, vocab_size=vocabulary.vocab_size + 77)
    mask = (
        GrammarCompiler(padded).compile(Grammar(kind=GrammarKind.REGEX, text="(?s).*")).new_mask()
    )
    allowed = mask.allowed_tokens()
    assert allowed.shape == (padded.vocab_size,)
    assert allowed[: vocabulary.vocab_size].any()
    assert not allowed[vocabulary.vocab_size :].any()


def test_tokens_without_a_row_are_cut_off(vocabulary: Vocabulary) -> None:
    cut = replace(vocabulary, vocab_size=vocabulary.vocab_size - 30)
    mask = GrammarCompiler(cut).compile(Grammar(kind=GrammarKind.REGEX, text="(?s).*")).new_mask()
    assert mask.allowed_tokens().shape == (cut.vocab_size,)


def test_control_tokens_are_not_text(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="(?s).*"))
    assert compiled.new_mask().allowed_tokens()[:3].tolist() == [False, False, True]


def test_a_wrong_token_is_an_error_of_this_mask_alone(
    compiler: GrammarCompiler, encode: Encode
) -> None:
    compiled = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="ab"))
    bad, good = compiled.new_mask(), compiled.new_mask()
    with pytest.raises(ValueError, match="does not match"):
        bad.advance(encode("b"))
    with pytest.raises(ValueError, match="mask"):
        bad.allowed_tokens()
    good.advance(encode("ab"))
    assert good.allowed_tokens().nonzero()[0].tolist() == [EOS_TOKEN_ID]


def test_tokens_taken_together_or_alone_lead_to_the_same_mask(
    compiler: GrammarCompiler, encode: Encode
) -> None:
    compiled = compiler.compile(schema_grammar(SCHEMAS["person"]))
    token_ids = encode('{"name": "The quick", "ag')
    together, alone = compiled.new_mask(), compiled.new_mask()
    together.advance(token_ids)
    for token_id in token_ids:
        alone.allowed_tokens()
        alone.advance([token_id])
    assert together.num_tokens == alone.num_tokens == len(token_ids)
    assert np.array_equal(together.allowed_tokens(), alone.allowed_tokens())


def test_pieces_with_bytes_to_fall_back_on(tmp_path: Path) -> None:
    backend = byte_fallback_backend()
    backend.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(str(tmp_path), eos_token_ids=(2,))
    compiled = GrammarCompiler(vocabulary).compile(
        Grammar(kind=GrammarKind.REGEX, text="a é🦊 the")
    )
    taken = walk(compiled, random.Random(0), (2,), most=40)
    assert taken is not None
    assert backend.decode(taken) == "a é🦊 the"


def test_a_model_that_lacks_what_is_needed_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_vocabulary(str(tmp_path))
    byte_fallback_backend().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="end-of-sequence"):
        load_vocabulary(str(tmp_path))


@pytest.mark.skipif(not DEMO_MODEL.is_dir(), reason="needs the demo model")
def test_the_demo_model_s_vocabulary() -> None:
    vocabulary = load_vocabulary(str(DEMO_MODEL))
    assert vocabulary.vocab_size == 49152
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    compiler = GrammarCompiler(vocabulary)
    for name in ("person", "tree", "pattern and formats"):
        compiled = compiler.compile(schema_grammar(SCHEMAS[name]))
        for seed in range(5):
            taken = walk(compiled, random.Random(seed), vocabulary.eos_token_ids, most=300)
            if taken is not None:
                value = json.loads(tokenizer.decode(taken, skip_special_tokens=False))
                jsonschema.validate(value, SCHEMAS[name])
    mask = compiler.compile(schema_grammar(SCHEMAS["person"])).new_mask()
    text = '{"name": "Ada", "age": 36, "email": null}'
    mask.advance(tokenizer.encode(text, add_special_tokens=False).ids)
    assert mask.allowed_tokens().nonzero()[0].tolist() == list(vocabulary.eos_token_ids)
