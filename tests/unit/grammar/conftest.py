"""Compilers for small vocabularies."""

import json
import random
from pathlib import Path

import pytest

from grammar.compiler import CompiledGrammar, GrammarCompiler
from grammar.grammar import Grammar, GrammarKind
from grammar.vocabulary import Vocabulary, load_vocabulary
from tests.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return load_vocabulary(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


def schema_grammar(schema: object) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


def walk(
    compiled: CompiledGrammar, rng: random.Random, eos_token_ids: tuple[int, ...], *, most: int
) -> list[int] | None:
    """Take any allowed token, `most` times; the tokens before the end, or None without an end."""
    mask, taken = compiled.new_mask(), []
    for _ in range(most):
        token_id = rng.choice(mask.allowed_tokens().nonzero()[0].tolist())
        if token_id in eos_token_ids:
            return taken
        mask.advance([token_id])
        taken.append(token_id)
    return None


DEMO_MODEL = Path(".models/smollm2-135m-instruct")
