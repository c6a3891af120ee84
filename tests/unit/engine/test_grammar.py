"""A request with a grammar: the same valid output however it is served."""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import FinishReason, Request, RequestOutput
from engine.sampling.grammar_masks import GrammarMasks
from engine.token_mask import TokenMaskError
from grammar.compiler import CompiledGrammar, GrammarCompiler
from grammar.grammar import Grammar, GrammarKind
from grammar.vocabulary import load_vocabulary
from tests.fakes import FakeClock
from tests.schemas import SCHEMAS
from tests.unit.engine.conftest import (
    BLOCK_SIZE,
    make_request,
    random_prompt,
    run,
    tokens_by_choice,
    tokens_by_request,
)

EOS = 2
MAX_TOKENS = 32
NAMES = ("person", "tree", "pattern and formats", "map", "multiple of")
PROMPTS = {name: random_prompt(5 + 3 * n) for n, name in enumerate(SCHEMAS)}
Compiled = dict[str, CompiledGrammar]


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(load_vocabulary(str(tiny_model)))


@pytest.fixture(scope="module")
def compiled(compiler: GrammarCompiler) -> Compiled:
    return {
        name: compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)))
        for name, schema in SCHEMAS.items()
    }


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def grammar_request(name: str, compiled: Compiled, **changes: object) -> Request:
    settings: dict[str, object] = {
        "max_tokens": MAX_TOKENS,
        "temperature": 1.8,
        "seed": len(name),
        "ignore_eos": False,
        **changes,
    }
    token_ids = settings.pop("token_ids", PROMPTS[name])
    request = make_request(name, token_ids, **settings)  # type: ignore[arg-type]
    request.new_token_mask = compiled[name].new_mask
    return request


def pattern_request(compiler: GrammarCompiler, pattern: str, **changes: object) -> Request:
    made = compiler.compile(Grammar(kind=GrammarKind.REGEX, text=pattern))
    request = make_request(
        "r",
        random_prompt(6),
        **{"temperature": 1.5, "ignore_eos": False, **changes},  # type: ignore[arg-type]
    )
    request.new_token_mask = made.new_mask
    return request


def serve(engine: Engine, request: Request) -> tuple[list[int], RequestOutput]:
    engine.add_request(request)
    outputs = run(engine)
    return tokens_by_request(outputs)[request.request_id], outputs[-1]


def serve_all(engine: Engine, compiled: Compiled, **changes: object) -> dict[str, list[int]]:
    for name in NAMES:
        engine.add_request(grammar_request(name, compiled, **changes))
    return tokens_by_request(run(engine))


@pytest.fixture(scope="module")
def truth(tiny_model: Path, compiled: Compiled) -> dict[str, list[int]]:
    """Each alone."""
    config = EngineConfig(model_path=str(tiny_model), block_size=BLOCK_SIZE, num_kv_blocks=64)
    engine = Engine(config)
    return {name: serve(engine, grammar_request(name, compiled))[0] for name in NAMES}


def test_what_was_drawn_at_a_high_temperature_is_valid(
    make_engine: Callable[..., Engine], compiled: Compiled, tokenizer: Tokenizer
):
    engine = make_engine(num_kv_blocks=512, max_num_seqs=32)
    for name in SCHEMAS:
        engine.add_request(grammar_request(name, compiled, max_tokens=120))
    outputs = run(engine)
    tokens = tokens_by_request(outputs)
    ended = [each.request_id for each in outputs if each.finish_reason is FinishReason.STOP]
    assert len(ended) >= len(SCHEMAS) - 3
    for name in ended:
        assert tokens[name][-1] == EOS
        value = json.loads(tokenizer.decode(tokens[name][:-1], skip_special_tokens=False))
        jsonschema.validate(value, SCHEMAS[name])


def test_batched(
    make_engine: Callable[..., Engine], compiled: Compiled, truth: dict[str, list[int]]
):
    engine = make_engine(num_kv_blocks=256, max_num_seqs=16, max_num_batched_tokens=512)
    assert serve_all(engine, compiled) == truth


def test_chunked(
    make_engine: Callable[..., Engine], compiled: Compiled, truth: dict[str, list[int]]
):
    engine = make_engine(num_kv_blocks=256, max_num_batched_tokens=9)
    assert serve_all(engine, compiled) == truth


def test_preempted(
    make_engine: Callable[..., Engine], compiled: Compiled, truth: dict[str, list[int]]
):
    engine = make_engine(num_kv_blocks=16)
    assert serve_all(engine, compiled) == truth
    assert engine.load().num_preemptions > 0


def test_replayed_after_its_worker_was_lost(
    make_engine: Callable[..., Engine], compiled: Compiled, truth: dict[str, list[int]]
):
    engine = make_engine(num_kv_blocks=256)
    num_known = dict(zip(NAMES, (1, 2, 5, 7, 1), strict=True))
    for name in NAMES:
        prompt, known = PROMPTS[name], truth[name][: num_known[name]]
        assert len(known) < len(truth[name])
        request = grammar_request(
            name, compiled, token_ids=prompt + known, num_prompt_tokens=len(prompt)
        )
        engine.add_request(request)
    rest = tokens_by_request(run(engine))
    assert rest == {name: truth[name][num_known[name] :] for name in NAMES}


def test_handed_over(
    make_engine: Callable[..., Engine], compiled: Compiled, truth: dict[str, list[int]]
):
    prefill, decode = make_engine(num_kv_blocks=128), make_engine(num_kv_blocks=256)
    for name in NAMES:
        prefill.add_request(grammar_request(name, compiled, hand_over=True))
    tokens = tokens_by_request(run(prefill))
    for name in NAMES:
        reservation = decode.reserve(grammar_request(name, compiled))
        assert reservation is not None
        for source, target in zip(prefill.blocks_of(name), reservation.block_ids, strict=False):
            decode.kv_cache.tensor[target] = prefill.kv_cache.tensor[source]
        prefill.release(name)
        decode.activate(name, {0: tokens[name][0]})
    for name, rest in tokens_by_request(run(decode)).items():
        tokens[name] += rest
    assert tokens == truth


def test_each_of_several_choices_has_its_own_way(
    make_engine: Callable[..., Engine], compiled: Compiled
):
    engine = make_engine(num_kv_blocks=128)
    engine.add_request(grammar_request("person", compiled, num_choices=3))
    together = tokens_by_choice(run(engine), "person")
    assert len({tuple(tokens) for tokens in together.values()}) == 3
    for choice_index, tokens in together.items():
        engine.add_request(grammar_request("person", compiled, choice_index=choice_index))
        assert tokens_by_choice(run(engine), "person") == {choice_index: tokens}


def test_neighbours_without_a_grammar_are_as_they_would_be_alone(
    make_engine: Callable[..., Engine], compiled: Compiled, truth: dict[str, list[int]]
):
    alone, _ = serve(make_engine(), make_request("plain", random_prompt(9), max_tokens=20))
    engine = make_engine()
    engine.add_request(make_request("plain", random_prompt(9), max_tokens=20))
    engine.add_request(grammar_request("person", compiled))
    tokens = tokens_by_request(run(engine))
    assert tokens == {"plain": alone, "person": truth["person"]}


def test_a_grammar_is_followed_by_the_greedy_too(
    make_engine: Callable[..., Engine], compiler: GrammarCompiler, tokenizer: Tokenizer
):
    request = pattern_request(compiler, "(yes|no)( [0-9]{3}){2}", temperature=0.0, max_tokens=30)
    tokens, last = serve(make_engine(), request)
    assert last.finish_reason is FinishReason.STOP
    text = tokenizer.decode(tokens)
    assert text[:2] in {"ye", "no"}
    assert len(text.split()) == 3


def test_the_end_of_a_grammar_comes_before_min_tokens(
    make_engine: Callable[..., Engine], compiler: GrammarCompiler
):
    tokens, last = serve(
        make_engine(), pattern_request(compiler, "ab", min_tokens=10, max_tokens=20)
    )
    assert (tokens[-1], last.finish_reason) == (EOS, FinishReason.STOP)
    assert len(tokens) <= 3


def test_min_tokens_holds_while_there_is_more_to_say(
    make_engine: Callable[..., Engine], compiler: GrammarCompiler
):
    tokens, _ = serve(make_engine(), pattern_request(compiler, "a*", min_tokens=10, max_tokens=12))
    assert len(tokens) >= 10
    assert EOS not in tokens[:9]


def test_a_stop_token_that_must_come_does_not_end_it_before_min_tokens(
    make_engine: Callable[..., Engine], compiler: GrammarCompiler, tokenizer: Tokenizer
):
    stop = tokenizer.token_to_id("a")
    request = pattern_request(compiler, "aaab", min_tokens=4, max_tokens=20, stop_token_ids=(stop,))
    tokens, last = serve(make_engine(), request)
    assert tokenizer.decode(tokens[:-1]) == "aaab"
    assert last.finish_reason is FinishReason.STOP


def test_max_tokens_cuts_it_short(make_engine: Callable[..., Engine], compiler: GrammarCompiler):
    tokens, last = serve(make_engine(), pattern_request(compiler, "[ab]{50}", max_tokens=7))
    assert len(tokens) == 7
    assert last.finish_reason is FinishReason.LENGTH


def test_allowed_token_ids_choose_within_the_grammar(
    make_engine: Callable[..., Engine], compiler: GrammarCompiler, tokenizer: Tokenizer
):
    allowed = (tokenizer.token_to_id("b"), EOS)
    request = pattern_request(compiler, "[ab]{3}", allowed_token_ids=allowed)
    tokens, _ = serve(make_engine(), request)
    assert tokenizer.decode(tokens[:-1]) == "bbb"
    request = pattern_request(compiler, "c", allowed_token_ids=allowed)
    _, last = serve(make_engine(), request)
    assert last.finish_reason is FinishReason.ERROR
    assert "allowed_token_ids" in str(last.error)
    assert last.is_refused


CONTRADICTIONS: list[dict[str, object]] = [
    {"min_tokens": MAX_TOKENS, "stop_token_ids": tuple(range(3, 320))},
    {"bad_words": tuple((token_id,) for token_id in range(3, 320))},
    {"bad_words": tuple((token_id, other) for token_id in range(40, 60) for other in (95, 96))},
    {"logit_bias": dict.fromkeys(range(320), -100.0)},
    {"logit_bias": {EOS: 100.0, 90: 100.0, 300: 100.0}},
    {"logit_bias": {EOS: -100.0}, "bad_words": ((EOS,),), "min_tokens": MAX_TOKENS},
    {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"top_k": 1, "top_p": 1e-9, "min_p": 1.0, "temperature": 2.0},
]


@pytest.mark.parametrize("number", range(len(CONTRADICTIONS)))
def test_no_other_wish_leads_an_output_out_of_its_grammar(
    make_engine: Callable[..., Engine], compiled: Compiled, number: int
):
    engine = make_engine(num_kv_blocks=512, max_num_seqs=32)
    for name in SCHEMAS:
        engine.add_request(grammar_request(name, compiled, **CONTRADICTIONS[number]))
    outputs = run(engine)
    ends = {each.request_id: each for each in outputs if each.finish_reason is not None}
    for name, tokens in tokens_by_request(outputs).items():
        assert ends[name].error is None
        has_end = tokens[-1] == EOS
        compiled[name].new_mask().advance(tokens[:-1] if has_end else tokens)
        # A stop token may end it at once; else it goes to its end or to the budget.
        assert has_end or "stop_token_ids" in CONTRADICTIONS[number] or len(tokens) == MAX_TOKENS


class BrokenMask:
    """Fails where it is told to."""

    num_tokens = 0

    def __init__(self, where: str) -> None:
        self._where = where

    def advance(self, token_ids: Sequence[int]) -> None:
        if self._where == "advance" and token_ids:
            raise ValueError("no such way")
        self.num_tokens += len(token_ids)

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        if self._where == "mask":
            raise RuntimeError("no mask")
        return np.ones(320, dtype=np.bool_)


def make_broken() -> BrokenMask:
    raise ValueError("no start")


@pytest.mark.parametrize("where", ["start", "advance", "mask"])
def test_a_mask_that_fails_fails_its_own_request(make_engine: Callable[..., Engine], where: str):
    alone, _ = serve(make_engine(), make_request("good", random_prompt(9)))
    engine = make_engine()
    engine.add_request(make_request("good", random_prompt(9)))
    broken = make_request("bad", random_prompt(7))
    broken.new_token_mask = make_broken if where == "start" else lambda: BrokenMask(where)
    engine.add_request(broken)
    outputs = run(engine)
    ends = {each.request_id: each for each in outputs if each.finish_reason is not None}
    assert ends["bad"].finish_reason is FinishReason.ERROR
    assert "no " in str(ends["bad"].error)
    # A way that is not there is the grammar's fault; what broke elsewhere is not.
    assert ends["bad"].is_refused == (where == "advance")
    assert tokens_by_request(outputs)["good"] == alone


class CostlyMask(BrokenMask):
    """Takes its time, on a clock of the test."""

    def __init__(self, clock: FakeClock, cost_s: float) -> None:
        super().__init__("")
        self._clock = clock
        self._cost_s = cost_s

    def allowed_tokens(self) -> npt.NDArray[np.bool_]:
        self._clock.advance(self._cost_s)
        return super().allowed_tokens()


@pytest.mark.parametrize(("cost_s", "most"), [(0.009, 40), (0.03, 25), (0.2, 2), (9.0, 0)])
def test_a_grammar_that_slows_its_neighbours_down_is_ended(cost_s: float, most: int):
    clock = FakeClock()
    masks = GrammarMasks(now=clock)
    request = make_request("r", random_prompt(5))
    request.new_token_mask = lambda: CostlyMask(clock, cost_s)
    num_masks = 0
    with pytest.raises(TokenMaskError, match="too costly") if most < 40 else nullcontext():
        for _ in range(40):
            masks.start([request])
            masks.take(request)
            num_masks += 1
            request.token_ids.append(5)
    assert num_masks == most


def test_an_output_that_does_not_match_fails_its_request(
    make_engine: Callable[..., Engine], compiled: Compiled
):
    prompt = PROMPTS["person"]
    request = grammar_request(
        "person", compiled, token_ids=[*prompt, 5, 6], num_prompt_tokens=len(prompt)
    )
    _, last = serve(make_engine(), request)
    assert last.finish_reason is FinishReason.ERROR
    assert "does not match" in str(last.error)


def test_without_a_grammar_there_is_no_thread(make_engine: Callable[..., Engine]):
    before = {thread.name for thread in threading.enumerate()}
    serve(make_engine(), make_request("plain", random_prompt(9)))
    assert not any(
        thread.name.startswith("token-masks") and thread.name not in before
        for thread in threading.enumerate()
    )
