"""Real Gemma 3: sliding windows, two RoPE bases, one KV head, a vocabulary of 262,144 pieces."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engine.config import EngineConfig
from engine.engine import Engine
from tests.reference import Truth, generate_truth
from tests.unit.engine.conftest import generate, make_request

GEMMA = Path(".models/gemma-3-270m")
NUM_TOKENS = 16
WINDOW = 512
SENTENCE = "The old lighthouse keeper counted the ships that passed, and wrote each one in a book. "

# What Gemma's own tokenizer makes of them, BOS (2) first.
TEXTS: dict[str, list[int]] = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "Hello world": [2, 9259, 1902],
    "  two spaces": [2, 138, 13498, 9952],
    "1234567": [2, 236770, 236778, 236800, 236812, 236810, 236825, 236832],
    "a\n\nb": [2, 236746, 108, 236763],
    "<start_of_turn>user": [2, 105, 2364],
    "\t tab": [2, 255968, 6937],
    "é🦊": [2, 236859, 249086],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    assert GEMMA.is_dir(), "Gemma is not there: run make gemma"
    return PreTrainedTokenizerFast.from_pretrained(GEMMA, local_files_only=True)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    return {
        "short": tokenizer("The capital of France is").input_ids,
        "past the window": tokenizer(SENTENCE * 40).input_ids[: WINDOW + 20],
    }


@pytest.fixture(scope="module")
def truth(prompts: dict[str, list[int]]) -> dict[str, Truth]:
    return generate_truth(GEMMA, prompts, num_tokens=NUM_TOKENS, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(
            model_path=str(GEMMA),
            dtype="float32",
            block_size=32,
            num_kv_blocks=48,
            max_num_batched_tokens=256,
        )
    )
    yield engine
    engine.check_integrity()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chunked_and_cached_it_says_what_generate_says(
    engine: Engine, prompts: dict[str, list[int]], truth: dict[str, Truth]
):
    long = "past the window"
    for name, num_cached in (("short", 0), (long, 0), (long, (len(prompts[long]) - 1) // 32 * 32)):
        request = make_request(f"{name} {num_cached}", prompts[name], max_tokens=NUM_TOKENS)
        assert truth[name].agrees_with(generate(engine, request), may_tie=True)
        assert request.num_cached_tokens == num_cached


@pytest.mark.parametrize("text", TEXTS)
def test_text_becomes_gemma_s_tokens(tokenizer: PreTrainedTokenizerFast, text: str):
    token_ids = tokenizer(text).input_ids
    assert token_ids == TEXTS[text]
    assert tokenizer.decode(token_ids[1:]) == text


def test_every_token_has_an_embedding(tokenizer: PreTrainedTokenizerFast, engine: Engine):
    assert len(tokenizer) == engine.vocab_size == 262_144
    assert engine.eos_token_ids == (tokenizer.eos_token_id,)
