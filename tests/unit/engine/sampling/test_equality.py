"""Whatever is asked of the sampler, a request gets the same tokens however it is served."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.request import FinishReason, Request, RequestOutput
from engine.token_logprobs import TokenLogprobs
from tests.unit.engine.conftest import (
    generate,
    make_request,
    random_prompt,
    run,
    tokens_by_request,
)
from tests.unit.engine.sampling.mixed_params import MIXED

NUM_TOKENS = 12
PROMPTS = {name: random_prompt(9 + 3 * n) for n, name in enumerate(MIXED)}


def request_of(name: str, request_id: str | None = None, **changes: object) -> Request:
    params = {"max_tokens": NUM_TOKENS, **MIXED[name], **changes}
    return make_request(request_id or name, PROMPTS[name], **params)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def solo_outputs() -> dict[str, list[RequestOutput]]:
    return {}


@pytest.fixture
def solo(
    make_engine: Callable[..., Engine], solo_outputs: dict[str, list[RequestOutput]]
) -> dict[str, list[RequestOutput]]:
    """What each request gives alone."""
    if not solo_outputs:
        engine = make_engine()
        for name in MIXED:
            engine.add_request(request_of(name, cache_salt=name))
            solo_outputs[name] = run(engine)
    return solo_outputs


def expected_tokens(solo: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    return {name: tokens_by_request(outputs)[name] for name, outputs in solo.items()}


def logprobs_of(outputs: Sequence[RequestOutput], request_id: str) -> list[TokenLogprobs]:
    return [each for o in outputs if o.request_id == request_id for each in o.logprobs]


def assert_same_logprobs(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert math.isclose(ours.logprob, theirs.logprob, rel_tol=1e-9)
        assert ours.rank == theirs.rank
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
        assert all(
            math.isclose(a, b, rel_tol=1e-9)
            for (_, a), (_, b) in zip(ours.top, theirs.top, strict=True)
        )


def test_the_parameters_do_what_they_should(solo: dict[str, list[RequestOutput]]) -> None:
    tokens = expected_tokens(solo)
    assert set(tokens["allowed"]) <= set(range(30, 60))
    pairs = list(zip(tokens["banned"], tokens["banned"][1:], strict=False))
    assert not {(7, 9), (9, 9)} & set(pairs)
    assert 11 not in tokens["banned"]
    assert {7, 9} & set(tokens["banned"])  # the bias works, so that the ban had something to do
    assert 20 not in tokens["biased"]
    assert len(tokens["held"]) >= 6
    assert all(token_id >= 160 for token_id in tokens["held"][:6])
    assert solo["held"][-1].finish_reason is FinishReason.STOP
    assert len(set(tokens["greedy-penalised"])) == NUM_TOKENS
    entries = logprobs_of(solo["told"], "told")
    assert [len(entry.top) for entry in entries] == [3] * NUM_TOKENS


@pytest.mark.parametrize("size", [3, 8])
def test_in_any_batch(
    make_engine: Callable[..., Engine], solo: dict[str, list[RequestOutput]], size: int
) -> None:
    """Neighbours come and go at random."""
    engine = make_engine(max_num_seqs=size, max_num_batched_tokens=40, num_kv_blocks=128)
    names = list(MIXED)
    random.Random(size).shuffle(names)
    for number, name in enumerate(names):
        engine.add_request(request_of(name))
        neighbour = random_prompt(5 + number, seed=size)
        changes = {"temperature": 1.0, "seed": number, "max_tokens": 2 + number}
        engine.add_request(make_request(f"n-{name}", neighbour, **changes))  # type: ignore[arg-type]
    outputs = run(engine)
    tokens = tokens_by_request(outputs)
    assert {name: tokens[name] for name in MIXED} == expected_tokens(solo)
    for name in ("told", "all"):
        assert_same_logprobs(logprobs_of(outputs, name), logprobs_of(solo[name], name))


def test_a40_chunked_and_preempted(
    make_engine: Callable[..., Engine], solo: dict[str, list[RequestOutput]]
) -> None:
    """Penalties and budgets count from the client's prompt, not from what was recomputed."""
    engine = make_engine(num_kv_blocks=13, max_num_seqs=8, max_num_batched_tokens=16)
    for name in MIXED:
        engine.add_request(request_of(name))
    outputs = run(engine)
    assert engine.load().num_preemptions > 0
    assert tokens_by_request(outputs) == expected_tokens(solo)
    assert_same_logprobs(logprobs_of(outputs, "told"), logprobs_of(solo["told"], "told"))


@pytest.mark.parametrize("num_done", [1, 5])
def test_replayed_elsewhere_after_a_migration(
    make_engine: Callable[..., Engine], solo: dict[str, list[RequestOutput]], num_done: int
) -> None:
    engine = make_engine()
    expected = expected_tokens(solo)
    for name, prompt in PROMPTS.items():
        request = request_of(name, num_prompt_tokens=len(prompt))
        request.token_ids += expected[name][:num_done]
        assert generate(engine, request) == expected[name][num_done:]


def test_handed_over(
    make_engine: Callable[..., Engine], solo: dict[str, list[RequestOutput]]
) -> None:
    prefill, decode = make_engine(), make_engine()
    for name in MIXED:
        prefill.add_request(request_of(name, hand_over=True))
    first = run(prefill)
    tokens = tokens_by_request(first)
    for name, prompt in PROMPTS.items():
        reservation = decode.reserve(request_of(name, cache_salt=name))
        assert reservation is not None
        source = prefill.blocks_of(name)
        target = reservation.block_ids[: len(source)]
        decode.kv_cache.tensor[target] = prefill.kv_cache.tensor[source]
        prefill.release(name)
        assert decode.activate(name, {0: tokens[name][0]}) == []
        assert len(prompt) > 0
    rest = run(decode)
    both = {name: tokens[name] + tokens_by_request(rest)[name] for name in MIXED}
    assert both == expected_tokens(solo)
    for name in ("told", "all"):
        got = logprobs_of(first, name) + logprobs_of(rest, name)
        assert_same_logprobs(got, logprobs_of(solo[name], name))


def test_choices_of_one_seed_differ(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    tokens = [
        tuple(generate(engine, request_of("seeded", f"r-{index}", choice_index=index)))
        for index in range(4)
    ]
    assert len(set(tokens)) == 4


# Logprobs of prompts


def prompt_entries(outputs: Sequence[RequestOutput], request_id: str) -> list[TokenLogprobs]:
    """All of them, each told once, in order and before the first token."""
    entries: list[TokenLogprobs] = []
    for output in outputs:
        if output.request_id != request_id or output.prompt_logprobs is None:
            continue
        assert output.prompt_logprobs.start_position == 1 + len(entries)
        entries += output.prompt_logprobs.entries
    return entries


@pytest.fixture(scope="module")
def prompt_truth(tiny_model: Path) -> torch.Tensor:
    """Log-probabilities of transformers' own forward, [tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.inference_mode():
        return model(torch.tensor([random_prompt(45)])).logits[0].log_softmax(dim=-1)


def assert_is_prompt_truth(entries: Sequence[TokenLogprobs], truth: torch.Tensor) -> None:
    prompt = random_prompt(45)
    assert len(entries) == len(prompt) - 1
    for position, entry in enumerate(entries):
        row = truth[position]
        assert math.isclose(entry.logprob, row[prompt[position + 1]], rel_tol=1e-9)
        best = row.topk(2)
        assert [i for i, _ in entry.top] == best.indices.tolist()


@pytest.mark.parametrize("budget", [8, 17, 64])
def test_logprobs_of_a_prompt_in_chunks_and_past_the_cache(
    make_engine: Callable[..., Engine], prompt_truth: torch.Tensor, budget: int
) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    plain = generate(engine, make_request("before", random_prompt(45)))
    engine.add_request(make_request("other", random_prompt(30)))
    request = make_request("r", random_prompt(45), num_prompt_logprobs=2)
    engine.add_request(request)
    outputs = run(engine)
    assert_is_prompt_truth(prompt_entries(outputs, "r"), prompt_truth)
    assert request.num_cached_tokens == 0
    assert tokens_by_request(outputs)["r"] == plain
    # What it computed is in the cache for others.
    after = make_request("after", random_prompt(45))
    assert generate(engine, after) == plain
    assert after.num_cached_tokens == 40


def test_logprobs_of_a_prompt_are_told_once_when_it_is_preempted(
    make_engine: Callable[..., Engine], prompt_truth: torch.Tensor
) -> None:
    engine = make_engine(num_kv_blocks=12, max_num_seqs=4, max_num_batched_tokens=16)
    engine.add_request(make_request("first", random_prompt(30), max_tokens=40))
    request = make_request("r", random_prompt(45), max_tokens=30, num_prompt_logprobs=2)
    engine.add_request(request)
    outputs = run(engine)
    assert request.num_preemptions > 0
    assert_is_prompt_truth(prompt_entries(outputs, "r"), prompt_truth)


def test_the_prefill_side_alone_tells_the_prompt_s_logprobs(
    make_engine: Callable[..., Engine], prompt_truth: torch.Tensor
) -> None:
    prefill, decode = make_engine(max_num_batched_tokens=16), make_engine()
    settings = {"num_prompt_logprobs": 2, "num_logprobs": 0}
    prefill.add_request(make_request("r", random_prompt(45), hand_over=True, **settings))  # type: ignore[arg-type]
    outputs = run(prefill)
    assert_is_prompt_truth(prompt_entries(outputs, "r"), prompt_truth)
    decode.reserve(make_request("r", random_prompt(45), **settings))  # type: ignore[arg-type]
    decode.activate("r", {0: outputs[-1].token_ids[0]})
    assert not any(output.prompt_logprobs for output in run(decode))
    prefill.release("r")


def test_a_step_computes_a_bounded_number_of_prompt_logits(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.chunk_shares._MAX_PROMPT_LOGITS", 20)
    engine = make_engine(max_num_batched_tokens=512, num_kv_blocks=64)
    for name in ("a", "b"):
        prompt = random_prompt(45, seed=ord(name))
        engine.add_request(make_request(name, prompt, num_prompt_logprobs=0))
    engine.add_request(make_request("c", random_prompt(45)))
    outputs: list[RequestOutput] = []
    while engine.has_work():
        step = engine.step().outputs
        told = [o.prompt_logprobs.entries for o in step if o.prompt_logprobs]
        assert sum(map(len, told)) <= 20
        outputs += step
    assert [len(prompt_entries(outputs, name)) for name in "abc"] == [44, 44, 0]
    assert {len(tokens) for tokens in tokens_by_request(outputs).values()} == {12}
