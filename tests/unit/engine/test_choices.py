"""Several choices of one prompt: each equals its solo run, and the prompt is computed once."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import FinishReason
from tests.unit.engine.conftest import (
    BLOCK_SIZE,
    generate,
    make_request,
    random_prompt,
    run,
    tokens_by_choice,
)

NUM_CHOICES = 3
NUM_TOKENS = 12
PROMPTS = {
    f"len-{n}": random_prompt(n) for n in (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 27)
}
SEEDED = {"temperature": 1.0, "seed": 5, "max_tokens": NUM_TOKENS}
Truth = dict[str, dict[int, list[int]]]


@pytest.fixture
def truth(make_engine: Callable[..., Engine]) -> Truth:
    """What each choice says alone."""
    engine = make_engine()
    return {name: solo_runs(engine, prompt, **SEEDED) for name, prompt in PROMPTS.items()}


def solo_runs(engine: Engine, prompt: list[int], **params: Any) -> dict[int, list[int]]:
    return {
        index: generate(engine, make_request(f"solo-{index}", prompt, choice_index=index, **params))
        for index in range(NUM_CHOICES)
    }


def add_all(engine: Engine, **changes: Any) -> None:
    for name, prompt in PROMPTS.items():
        engine.add_request(
            make_request(name, prompt, num_choices=NUM_CHOICES, **{**SEEDED, **changes})
        )


def assert_empty(engine: Engine) -> None:
    engine.check_integrity()
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 3},  # one after the other
        {"max_num_seqs": 16, "max_num_batched_tokens": 512},  # all at once
        {"max_num_batched_tokens": 8},  # chunked
        {"num_kv_blocks": 11},  # preempted
    ],
    ids=["alone", "batched", "chunked", "preempted"],
)
def test_each_choice_equals_its_solo_run(
    make_engine: Callable[..., Engine], truth: Truth, settings: dict[str, int]
):
    engine = make_engine(**settings)
    add_all(engine)
    outputs = run(engine)
    assert {name: tokens_by_choice(outputs, name) for name in PROMPTS} == truth
    ends = [(o.request_id, o.choice_index) for o in outputs if o.finish_reason is not None]
    assert sorted(ends) == sorted((name, i) for name in PROMPTS for i in range(NUM_CHOICES))
    if "num_kv_blocks" in settings:
        assert engine.load().num_preemptions > 0
    assert_empty(engine)


def test_seeded_choices_differ_and_greedy_ones_do_not(
    make_engine: Callable[..., Engine], truth: Truth
):
    for tokens in truth.values():
        assert len({tuple(each) for each in tokens.values()}) == NUM_CHOICES
    engine = make_engine()
    add_all(engine, temperature=0.0)
    outputs = run(engine)
    for name in PROMPTS:
        greedy = tokens_by_choice(outputs, name)
        assert len(greedy) == NUM_CHOICES
        assert len({tuple(each) for each in greedy.values()}) == 1


def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(
    make_engine: Callable[..., Engine],
):
    engine = make_engine()
    prompt = random_prompt(2 * BLOCK_SIZE + 3)
    engine.add_request(make_request("r", prompt, num_choices=NUM_CHOICES, max_tokens=3))
    assert engine.step().stats.num_tokens == len(prompt)
    assert engine.block_counts().used == 2 + NUM_CHOICES
    assert engine.step().stats.num_tokens == NUM_CHOICES
    assert engine.load().num_running == NUM_CHOICES
    run(engine)
    assert_empty(engine)


def test_choices_take_their_places_from_the_start(make_engine: Callable[..., Engine]):
    engine = make_engine(max_num_seqs=4)
    engine.add_request(make_request("first", random_prompt(20), num_choices=3, max_tokens=4))
    engine.add_request(make_request("second", random_prompt(9), num_choices=2, max_tokens=4))
    engine.add_request(make_request("third", random_prompt(5), max_tokens=4))
    engine.step()
    # First come, first served: the third does not overtake the second, which finds no two places.
    load = engine.load()
    assert (load.num_running, load.num_waiting) == (3, 3)
    outputs = run(engine)
    assert sum(output.finish_reason is FinishReason.LENGTH for output in outputs) == 6


def test_more_choices_than_ever_fit_are_refused(make_engine: Callable[..., Engine]):
    engine = make_engine(max_num_seqs=4, num_kv_blocks=6)
    with pytest.raises(ValueError, match="max_num_seqs"):
        engine.add_request(make_request("r", random_prompt(4), num_choices=5))
    with pytest.raises(ValueError, match="choices"):
        engine.add_request(make_request("r", random_prompt(4), num_choices=0))
    with pytest.raises(ValueError, match="blocks"):
        engine.reserve(make_request("r", random_prompt(3 * BLOCK_SIZE), num_choices=4))
    # Just fits: the shared blocks and one for each.
    engine.add_request(make_request("r", random_prompt(2 * BLOCK_SIZE), num_choices=4))
    assert sum(output.finish_reason is not None for output in run(engine)) == 4
    # A prefill worker runs the prompt alone.
    engine.add_request(make_request("r", random_prompt(4), num_choices=9, hand_over=True))
    assert len(tokens_by_choice(run(engine), "r")) == 9
    engine.release("r")


@pytest.mark.parametrize("length", [BLOCK_SIZE, 27])
def test_all_choices_go_on_after_one_hand_over(
    make_engine: Callable[..., Engine], truth: Truth, length: int
):
    prompt = random_prompt(length)
    expected = truth.get(f"len-{length}") or solo_runs(make_engine(), prompt, **SEEDED)
    # The first token of choice 1 ends it: nothing of it is left to decode.
    stop = (expected[1][0],)
    expected = {
        i: each[: each.index(stop[0]) + 1] if stop[0] in each else each
        for i, each in expected.items()
    }
    facts = {**SEEDED, "num_choices": NUM_CHOICES, "stop_token_ids": stop}
    prefill, decode = make_engine(), make_engine(num_kv_blocks=12)
    prefill.add_request(make_request("r", prompt, hand_over=True, **facts))
    outputs = run(prefill)
    first = {output.choice_index: output for output in outputs if output.token_ids}
    assert sorted(first) == [0, 1, 2]
    assert first[1].finish_reason is FinishReason.STOP
    assert prefill.block_counts().held == -(-length // BLOCK_SIZE)
    going_on = {i: o.token_ids[0] for i, o in first.items() if o.finish_reason is None}
    reservation = decode.reserve(make_request("r", prompt, **facts))
    assert reservation is not None
    assert decode.block_counts().used == length // BLOCK_SIZE + NUM_CHOICES
    for source, target in zip(prefill.blocks_of("r"), reservation.block_ids, strict=False):
        decode.kv_cache.tensor[target] = prefill.kv_cache.tensor[source]
    prefill.release("r")
    assert decode.activate("r", going_on) == []
    assert decode.block_counts().used == length // BLOCK_SIZE + len(going_on)
    rest = tokens_by_choice(run(decode), "r")
    got = {i: [*output.token_ids, *rest.get(i, [])] for i, output in first.items()}
    assert got == expected
    for engine in (prefill, decode):
        assert_empty(engine)


def test_activate_takes_tokens_of_known_choices_only(make_engine: Callable[..., Engine]):
    engine = make_engine()
    engine.reserve(make_request("r", random_prompt(9), num_choices=2))
    for tokens in ({}, {2: 5}, {0: 5, 1: -1}):
        with pytest.raises(ValueError, match="first_tokens"):
            engine.activate("r", tokens)
    assert len(engine.abort("r")) == 2
    assert_empty(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_one_choice_is_aborted_at_any_time_and_the_others_go_on(
    make_engine: Callable[..., Engine], truth: Truth, num_steps: int
):
    engine = make_engine(max_num_batched_tokens=16)
    engine.add_request(make_request("r", PROMPTS["len-27"], num_choices=NUM_CHOICES, **SEEDED))
    outputs = [output for _ in range(num_steps) for output in engine.step().outputs]
    (last,) = engine.abort_choice("r", 1)
    assert (last.choice_index, last.finish_reason) == (1, FinishReason.ABORT)
    assert engine.abort_choice("r", 1) == []
    assert engine.abort_choice("r", 7) == []
    engine.check_integrity()
    tokens = tokens_by_choice(outputs + run(engine), "r")
    expected = truth["len-27"]
    aborted = tokens.pop(1, [])
    assert aborted == expected[1][: len(aborted)]
    assert tokens == {0: expected[0], 2: expected[2]}
    assert_empty(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_the_last_choice_aborted_frees_everything(
    make_engine: Callable[..., Engine], num_steps: int
):
    engine = make_engine(max_num_batched_tokens=16)
    engine.add_request(make_request("r", PROMPTS["len-27"], num_choices=NUM_CHOICES, **SEEDED))
    for _ in range(num_steps):
        engine.step()
    for index in range(NUM_CHOICES):
        assert len(engine.abort_choice("r", index)) == 1
    assert not engine.has_work()
    assert engine.abort("r") == []
    assert_empty(engine)
