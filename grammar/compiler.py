"""Grammar -> what says which tokens may come next. The one module that calls llguidance.

The library refuses what it cannot enforce; nothing here makes it lenient.
"""

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import any_to_lark

from grammar.grammar import Grammar, GrammarError, GrammarKind
from grammar.vocabulary import Vocabulary

_MAX_REASON_CHARACTERS = 400
# Of the place of a fault: lines with their number before them, marks under them.
_DRAWING = re.compile(r"<non-verbose/>|\^+|(\d+ *)?\|.*|-+>.*")
# All of them, so that no schema can set its own through "x-guidance".
_JSON_OPTIONS: dict[str, Any] = {
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    # Enough for any pretty printer; a model that is lost cannot write blanks to the end.
    "whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,40}",
}


class GrammarMask:
    """One request's way through its grammar. Not for two threads at once."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self.num_tokens = 0  # taken so far
        self._matcher = matcher
        self._vocab_size = vocab_size

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take what was generated; ValueError when the grammar does not allow it."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise ValueError(f"the output does not match its grammar: {self._error()}")
        self.num_tokens += len(token_ids)

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [vocab]; when nothing may follow, those that end a text."""
        # Read only, and in whole words: it may be longer than the vocabulary.
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ValueError(f"the grammar's mask cannot be computed: {self._error()}")
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _error(self) -> str:
        return _first_lines(self._matcher.get_error())


class CompiledGrammar:
    """A grammar ready to be followed, by any number of requests."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self.compile_s = 0.0  # of processor time; its memory grows with it
        self._matcher = matcher  # never moved
        self._vocab_size = vocab_size

    def new_mask(self) -> GrammarMask:
        """Start at its beginning; takes some ten microseconds."""
        return GrammarMask(self._matcher.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles for one vocabulary. Making one takes half a second; it may move between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocab_size = vocabulary.vocab_size
        num_known = _num_tokens(vocabulary.tokenizer_json)
        self._tokenizer = llguidance.LLTokenizer(
            vocabulary.tokenizer_json,
            # The model may have rows beyond the tokenizer's last token, which nothing allows then,
            # or lack rows for its last ones, which are cut off every mask.
            n_vocab=max(self._vocab_size, num_known),
            eos_token=list(vocabulary.eos_token_ids),
        )
        # All others as the library has them: they bound one mask to some 0.2 s.
        self._limits = llguidance.LLParserLimits(verbose_errors=False)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, and look at the first mask: GrammarError when no output can match.

        Needs a deep stack (see stack.py), and time that only the caller can bound.
        """
        started_s = time.thread_time()
        matcher = llguidance.LLMatcher(
            self._tokenizer, _to_library(grammar), log_level=0, limits=self._limits
        )
        if matcher.is_error():
            raise GrammarError(_first_lines(matcher.get_error()))
        compiled = CompiledGrammar(matcher, self._vocab_size)
        try:
            is_dead = not compiled.new_mask().allowed_tokens().any()
        except ValueError as error:
            raise GrammarError(f"no output can match it: {error}") from error
        if is_dead:
            raise GrammarError("no output can match it")
        compiled.compile_s = time.thread_time() - started_s
        return compiled


def _to_library(grammar: Grammar) -> str:
    """Return the library's own form."""
    text = grammar.text
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return llguidance.LLMatcher.grammar_from_json_schema(
                    text,
                    overrides=_JSON_OPTIONS,  # type: ignore[arg-type]
                )
            case GrammarKind.REGEX:
                return llguidance.LLMatcher.grammar_from_regex(text)
            case GrammarKind.CHOICE:
                choices = " | ".join(_literal(choice) for choice in json.loads(text))
                return llguidance.LLMatcher.grammar_from_lark(f"start: {choices}")
            case GrammarKind.CFG:
                return llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except Exception as error:  # the converter of GBNF raises bare ones
        raise GrammarError(_first_lines(str(error))) from error


def _literal(text: str) -> str:
    """A string of the library's grammar; its escapes are JSON's, DEL must be one of them."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _num_tokens(tokenizer_json: str) -> int:
    """One more than the highest id."""
    content = json.loads(tokenizer_json)
    ids = [token["id"] for token in content.get("added_tokens", ())]
    vocab = content["model"]["vocab"]
    # Unigram models have a list in order of id, the others a mapping.
    ids += vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return max(ids, default=-1) + 1


def _first_lines(text: str) -> str:
    """What of a message of the library helps: not its drawing of the place."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if not _DRAWING.fullmatch(line)]
    return "; ".join(told or lines or ["it cannot be compiled"])[:_MAX_REASON_CHARACTERS]
