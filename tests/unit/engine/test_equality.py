"""The same greedy request gives the same tokens, however it is served."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.request import FinishReason, RequestStatus
from tests.unit.engine.conftest import (
    BLOCK_SIZE,
    generate,
    make_request,
    random_prompt,
    run,
    tokens_by_request,
)

NUM_TOKENS = 12
LENGTHS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 45)
PROMPTS = {f"len-{length}": random_prompt(length) for length in LENGTHS}


@pytest.fixture(scope="module")
def truth(tiny_model: Path) -> dict[str, list[int]]:
    """What transformers' own generate() says."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = {}
    for name, prompt in PROMPTS.items():
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            eos_token_id=-1,
            do_sample=False,
        )
        tokens[name] = output[0, len(prompt) :].tolist()
    return tokens


def serve_all(engine: Engine, **changes: object) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        engine.add_request(make_request(name, prompt, max_tokens=NUM_TOKENS, **changes))
    outputs = run(engine)
    engine.check_integrity()
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total
    return tokens_by_request(outputs)


def test_alone(make_engine: Callable[..., Engine], truth: dict[str, list[int]]):
    engine = make_engine()
    for name, prompt in PROMPTS.items():
        # Its own salt, so that none finds another's prefix.
        request = make_request(name, prompt, max_tokens=NUM_TOKENS, cache_salt=name)
        assert generate(engine, request) == truth[name]


def test_batched(make_engine: Callable[..., Engine], truth: dict[str, list[int]]):
    assert serve_all(make_engine(max_num_batched_tokens=512)) == truth


@pytest.mark.parametrize("budget", [8, 16, 17])
def test_chunked(make_engine: Callable[..., Engine], truth: dict[str, list[int]], budget: int):
    assert serve_all(make_engine(max_num_batched_tokens=budget)) == truth


def test_sent_three_times_with_equal_cache_hits(
    make_engine: Callable[..., Engine], truth: dict[str, list[int]]
):
    engine = make_engine()
    for name, prompt in PROMPTS.items():
        num_cached = []
        for attempt in range(3):
            request = make_request(f"{name}-{attempt}", prompt, max_tokens=NUM_TOKENS)
            assert generate(engine, request) == truth[name]
            num_cached.append(request.num_cached_tokens)
        full_blocks_before_last_token = (len(prompt) - 1) // BLOCK_SIZE
        assert num_cached == [0] + 2 * [full_blocks_before_last_token * BLOCK_SIZE]
    engine.check_integrity()


def test_preempted(make_engine: Callable[..., Engine], truth: dict[str, list[int]]):
    engine = make_engine(num_kv_blocks=11, max_num_seqs=8)
    assert serve_all(engine) == truth
    assert engine.load().num_preemptions > 0


def test_after_the_pool_was_overrun(
    make_engine: Callable[..., Engine], truth: dict[str, list[int]]
):
    engine = make_engine(num_kv_blocks=10)
    for round_number in range(3):
        for name, prompt in PROMPTS.items():
            request = make_request(f"{name}-{round_number}", prompt, max_tokens=NUM_TOKENS)
            assert generate(engine, request) == truth[name]
        generate(engine, make_request("filler", random_prompt(70, seed=round_number)))


@pytest.mark.parametrize("warm", [False, True])
def test_handed_over_between_two_engines(
    make_engine: Callable[..., Engine], truth: dict[str, list[int]], *, warm: bool
):
    prefill, decode = make_engine(), make_engine(num_kv_blocks=40)
    if warm:
        for name, prompt in PROMPTS.items():
            generate(decode, make_request(name, prompt, max_tokens=1))
    for name, prompt in PROMPTS.items():
        prefill.add_request(make_request(name, prompt, max_tokens=NUM_TOKENS, hand_over=True))
    first_tokens = tokens_by_request(run(prefill))
    for name, prompt in PROMPTS.items():
        reservation = decode.reserve(make_request(name, prompt, max_tokens=NUM_TOKENS))
        assert reservation is not None
        full_blocks = len(prompt) // BLOCK_SIZE * BLOCK_SIZE
        assert reservation.num_cached_tokens == (full_blocks if warm else 0)
        start = reservation.num_cached_tokens // BLOCK_SIZE
        num_blocks = -(-len(prompt) // BLOCK_SIZE)
        source = prefill.blocks_of(name)
        assert len(source) == num_blocks
        for number in range(start, num_blocks):
            target_id = reservation.block_ids[number]
            decode.kv_cache.tensor[target_id] = prefill.kv_cache.tensor[source[number]]
        prefill.release(name)
        assert decode.activate(name, {0: first_tokens[name][0]}) == []
    rest = tokens_by_request(run(decode))
    assert {name: first_tokens[name] + rest[name] for name in truth} == truth
    for engine in (prefill, decode):
        engine.check_integrity()
        counts = engine.block_counts()
        assert counts.free + counts.cached == counts.total


def test_replayed_after_a_migration(
    make_engine: Callable[..., Engine], truth: dict[str, list[int]]
):
    engine = make_engine()
    for name, prompt in PROMPTS.items():
        request = make_request(
            name,
            prompt + truth[name][:5],
            max_tokens=NUM_TOKENS,
            num_prompt_tokens=len(prompt),
        )
        engine.add_request(request)
        outputs = run(engine)
        assert tokens_by_request(outputs)[name] == truth[name][5:]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        first = next(output for output in outputs if output.token_ids)
        assert first.start_position == len(prompt) + 5


def test_two_engines_in_one_process_do_not_meet(
    make_engine: Callable[..., Engine], truth: dict[str, list[int]]
):
    engines = [make_engine(), make_engine(block_size=4, max_num_batched_tokens=16)]
    tokens: list[dict[str, list[int]]] = [{}, {}]
    for engine in engines:
        for name, prompt in PROMPTS.items():
            engine.add_request(make_request(name, prompt, max_tokens=NUM_TOKENS))
    while any(engine.has_work() for engine in engines):
        for engine, so_far in zip(engines, tokens, strict=True):
            for name, new in tokens_by_request(engine.step().outputs).items():
                so_far.setdefault(name, []).extend(new)
    assert tokens == [truth, truth]


def test_a_reserved_request_waits_for_its_kv(make_engine: Callable[..., Engine]):
    engine = make_engine()
    request = make_request("r", PROMPTS["len-45"])
    assert engine.reserve(request) is not None
    assert request.status is RequestStatus.WAITING_FOR_KV
    assert not engine.has_work()
    assert engine.load().num_waiting_for_kv == 1
    engine.check_integrity()
