"""Life of a request on one engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.request import FinishReason, Request, RequestOutput
from engine.sampling.sampler import sample
from engine.stopping import finish_reason
from tests.unit.engine.conftest import (
    BLOCK_SIZE,
    generate,
    make_request,
    random_prompt,
    run,
    tokens_by_request,
)

PROMPT = random_prompt(20)


def assert_empty(engine: Engine) -> None:
    engine.check_integrity()
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total
    assert not engine.has_work()


def last(outputs: list[RequestOutput], request_id: str) -> RequestOutput:
    return [output for output in outputs if output.request_id == request_id][-1]


def test_it_ends_by_length_and_tells_every_token_once(make_engine: Callable[..., Engine]):
    engine = make_engine()
    engine.add_request(make_request("r", PROMPT, max_tokens=5))
    outputs = run(engine)
    positions = [output.start_position for output in outputs if output.token_ids]
    assert positions == [20, 21, 22, 23, 24]
    assert last(outputs, "r").finish_reason is FinishReason.LENGTH
    assert_empty(engine)


def test_progress_of_a_prompt_is_told(make_engine: Callable[..., Engine]):
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(make_request("r", PROMPT, max_tokens=1))
    assert [(o.num_computed_tokens, len(o.token_ids)) for o in run(engine)] == [
        (8, 0),
        (16, 0),
        (20, 1),
    ]


def test_max_tokens_of_one_runs_no_decode(make_engine: Callable[..., Engine]):
    engine = make_engine()
    engine.add_request(make_request("r", PROMPT, max_tokens=1))
    outputs = run(engine)
    assert len(outputs) == 1
    assert outputs[0].finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_it_and_counts(make_engine: Callable[..., Engine]):
    engine = make_engine()
    tokens = generate(engine, make_request("probe", PROMPT))
    stop = tokens[3]
    engine.add_request(make_request("r", PROMPT, stop_token_ids=(stop,)))
    outputs = run(engine)
    assert tokens_by_request(outputs)["r"] == tokens[: tokens.index(stop) + 1]
    assert last(outputs, "r").finish_reason is FinishReason.STOP


def test_eos_ends_it_unless_ignored(make_engine: Callable[..., Engine]):
    engine = make_engine()
    tokens = generate(engine, make_request("probe", PROMPT))
    engine._requests.eos_token_ids = (tokens[0],)
    assert generate(engine, make_request("r", PROMPT, ignore_eos=False)) == tokens[:1]
    assert generate(engine, make_request("s", PROMPT)) == tokens


def test_min_tokens_holds_the_end_back(make_engine: Callable[..., Engine]):
    engine = make_engine()
    tokens = generate(engine, make_request("probe", PROMPT))
    request = make_request("r", PROMPT, stop_token_ids=(tokens[0],), min_tokens=4)
    longer = generate(engine, request)
    assert len(longer) >= 4
    assert tokens[0] not in longer[:4]


def test_it_ends_by_length_at_the_model_limit(make_engine: Callable[..., Engine]):
    engine = make_engine(max_model_len=24)
    engine.add_request(make_request("r", PROMPT, max_tokens=100))
    outputs = run(engine)
    assert len(tokens_by_request(outputs)["r"]) == 4
    assert last(outputs, "r").finish_reason is FinishReason.LENGTH


def test_a_request_may_fill_the_whole_pool(make_engine: Callable[..., Engine]):
    engine = make_engine(num_kv_blocks=4)
    assert engine.max_model_len == 4 * BLOCK_SIZE
    assert len(generate(engine, make_request("r", random_prompt(31), max_tokens=9))) == 1
    assert len(generate(engine, make_request("s", PROMPT, max_tokens=99))) == 12
    assert_empty(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "num_prompt_tokens"),
        ({"token_ids": [320]}, "token id"),
        ({"token_ids": [-1]}, "token id"),
        ({"token_ids": [3] * 64}, "fewer than"),
        ({"stop_token_ids": (999,)}, "stop token id"),
        ({"num_prompt_tokens": 21}, "num_prompt_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"num_prompt_tokens": 1, "max_tokens": 19}, "output tokens"),
    ],
)
def test_what_can_never_be_served_is_refused(
    make_engine: Callable[..., Engine], changes: dict[str, Any], message: str
):
    engine = make_engine(max_model_len=64)
    changes = {"token_ids": PROMPT, **changes}
    with pytest.raises(ValueError, match=message):
        engine.add_request(make_request("r", **changes))
    with pytest.raises(ValueError, match=message):
        engine.reserve(make_request("r", **changes))
    assert_empty(engine)


def test_an_id_in_use_is_refused(make_engine: Callable[..., Engine]):
    engine = make_engine()
    engine.add_request(make_request("r", PROMPT))
    with pytest.raises(ValueError, match="not in use"):
        engine.add_request(make_request("r", PROMPT))


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_hand_over_samples_once_and_holds_until_released(
    make_engine: Callable[..., Engine], max_tokens: int
):
    engine = make_engine()
    expected = generate(engine, make_request("probe", PROMPT, max_tokens=1))
    engine.add_request(make_request("r", PROMPT, max_tokens=max_tokens, hand_over=True))
    output = run(engine)[-1]
    assert list(output.token_ids) == expected
    assert output.finish_reason is (FinishReason.LENGTH if max_tokens == 1 else None)
    assert output.timings is not None
    assert not engine.has_work()
    assert engine.load().num_held_requests == 1
    assert engine.block_counts().held == 3
    assert len(engine.blocks_of("r")) == 3
    engine.check_integrity()
    assert engine.release("r") == []
    assert engine.release("r") == []
    assert engine.blocks_of("r") == []
    assert_empty(engine)


def test_a_hand_over_that_ends_at_eos_says_so(make_engine: Callable[..., Engine]):
    engine = make_engine()
    first = generate(engine, make_request("probe", PROMPT, max_tokens=1))[0]
    engine._requests.eos_token_ids = (first,)
    engine.add_request(make_request("r", PROMPT, hand_over=True, ignore_eos=False))
    assert run(engine)[-1].finish_reason is FinishReason.STOP
    engine.release("r")
    assert_empty(engine)


def test_activate_ends_a_request_whose_token_was_its_last(make_engine: Callable[..., Engine]):
    engine = make_engine()
    engine.reserve(make_request("r", PROMPT, max_tokens=1))
    (output,) = engine.activate("r", {0: 7})
    assert output is not None
    assert (output.finish_reason, output.token_ids) == (FinishReason.LENGTH, (7,))
    assert output.start_position == 20
    assert_empty(engine)


def test_activate_needs_a_reservation(make_engine: Callable[..., Engine]):
    engine = make_engine()
    with pytest.raises(ValueError, match="reserved"):
        engine.activate("nobody", {0: 7})
    engine.add_request(make_request("r", PROMPT))
    with pytest.raises(ValueError, match="reserved"):
        engine.activate("r", {0: 7})


def test_abort_in_every_state_frees_everything(make_engine: Callable[..., Engine]):
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    engine.add_request(make_request("decoding", random_prompt(6)))
    engine.step()
    engine.add_request(make_request("prefilling", random_prompt(30)))
    engine.step()
    engine.add_request(make_request("waiting", PROMPT))
    engine.reserve(make_request("reserved", PROMPT))
    engine.reserve(make_request("activated", random_prompt(9)))
    engine.activate("activated", {0: 5})
    for request_id in ("decoding", "prefilling", "waiting", "reserved", "activated"):
        (output,) = engine.abort(request_id)
        assert output is not None, request_id
        assert output.finish_reason is FinishReason.ABORT
        assert engine.abort(request_id) == []
        engine.check_integrity()
    assert engine.abort("unknown") == []
    engine.add_request(make_request("held", PROMPT, hand_over=True))
    run(engine)
    assert engine.abort("held") == []
    assert_empty(engine)


def test_block_events_follow_the_cache(make_engine: Callable[..., Engine]):
    engine = make_engine(num_kv_blocks=6)
    told: set[bytes] = set()
    for seed in range(4):
        generate(engine, make_request(f"r-{seed}", random_prompt(20, seed=seed)))
        events = engine.drain_block_events()
        told -= set(events.removed)
        told |= set(events.stored)
        assert told == set(engine.cached_block_hashes())
        assert len(told) >= 3


def test_timings_add_up(make_engine: Callable[..., Engine]):
    clock = iter(range(1000))
    engine = make_engine()
    engine._now = engine._steps._now = lambda: float(next(clock))
    engine.add_request(make_request("r", PROMPT, max_tokens=2))  # 0
    timings = engine.step().outputs[0].timings  # from 1 to 2
    assert timings is not None
    assert (timings.prefill_wait_s, timings.prefill_s) == (1.0, 1.0)
    engine.abort("r")
    engine.reserve(make_request("d", PROMPT))
    engine.activate("d", {0: 5})  # 3
    timings = engine.step().outputs[0].timings  # from 4 to 5
    assert timings is not None
    assert (timings.slot_wait_s, timings.first_decode_s) == (1.0, 1.0)
    assert timings.prefill_wait_s == timings.prefill_s == 0.0


def test_warm_up_knows_the_rates_and_leaves_no_trace(make_engine: Callable[..., Engine]):
    engine = make_engine()
    rates = engine.warm_up()
    assert rates.prefill_tokens_per_s > 0
    assert rates.decode_step_s(1) > 0
    assert rates.decode_step_s(8) > 0
    assert engine.load().prefill_tokens_per_s == rates.prefill_tokens_per_s
    assert engine.cached_block_hashes() == []
    assert not engine.drain_block_events()
    assert engine.block_counts().free == 64
    assert_empty(engine)


@pytest.mark.parametrize("size", [1, 2])
def test_warm_up_works_in_the_smallest_engine(make_engine: Callable[..., Engine], size: int):
    engine = make_engine(num_kv_blocks=size, block_size=2, max_num_seqs=1, max_num_batched_tokens=1)
    engine.warm_up()
    assert_empty(engine)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_seeded_sampling_is_the_same_in_every_batch(
    make_engine: Callable[..., Engine], batch_size: int
):
    def request(number: int, tag: str) -> Any:
        return make_request(
            f"{tag}-{number}",
            random_prompt(10 + number),
            seed=number,
            temperature=1.5,
            top_p=0.95,
        )

    solo = make_engine()
    alone = [generate(solo, request(number, "a")) for number in range(batch_size)]
    engine = make_engine(max_num_batched_tokens=16)
    for number in range(batch_size):
        engine.add_request(request(number, "b"))
    tokens = tokens_by_request(run(engine))
    assert [tokens[f"b-{number}"] for number in range(batch_size)] == alone
    assert len(set(map(tuple, alone))) == batch_size


def test_a_failing_forward_fails_its_batch_and_the_engine_goes_on(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(max_num_seqs=2)
    expected = generate(engine, make_request("probe", PROMPT))
    for name in ("a", "b", "c"):
        engine.add_request(make_request(name, PROMPT))
    forward = engine._runner.forward

    def fail(batch: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._runner, "forward", fail)
    step = engine.step()
    assert step.stats.has_failed
    assert {output.request_id for output in step.outputs} == {"a", "b"}
    for output in step.outputs:
        assert output.finish_reason is FinishReason.ERROR
        assert "out of memory" in (output.error or "")
    engine.check_integrity()
    monkeypatch.setattr(engine._runner, "forward", forward)
    assert tokens_by_request(run(engine))["c"] == expected
    assert_empty(engine)


def test_a_poisoned_request_fails_alone_and_leaves_nothing_behind(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(num_kv_blocks=12)
    clean = make_engine()
    expected = generate(clean, make_request("probe", PROMPT))
    poisoned = make_request("poisoned", random_prompt(17))
    engine.add_request(poisoned)
    engine.step()
    engine.kv_cache.tensor[poisoned.block_ids] = float("nan")
    engine.add_request(make_request("good", PROMPT))
    outputs = run(engine)
    assert last(outputs, "poisoned").finish_reason is FinishReason.ERROR
    assert tokens_by_request(outputs)["good"] == expected
    # Its blocks are given out again, and still hold the poison until they are wiped.
    assert torch.isnan(engine.kv_cache.tensor).any()
    # Two at a time: rows of a batch read past their own ends, behind a mask.
    for seed in range(3):
        pair = {f"{seed}-{length}": random_prompt(length, seed=seed) for length in (17, 26)}
        for name, prompt in pair.items():
            engine.add_request(make_request(name, prompt))
        tokens = tokens_by_request(run(engine))
        for name, prompt in pair.items():
            assert tokens[name] == generate(clean, make_request(name, prompt))
    assert generate(engine, make_request("same", random_prompt(17)))
    assert_empty(engine)


def test_a_block_that_is_padding_is_never_written(make_engine: Callable[..., Engine]):
    engine = make_engine(num_kv_blocks=12)
    for number, length in enumerate((3, 17, 30)):
        engine.add_request(make_request(str(number), random_prompt(length)))
    run(engine)
    assert not engine.kv_cache.slab_rows[-4:].any()


def test_reserved_blocks_are_wiped_unless_a_peer_fills_them_whole(
    make_engine: Callable[..., Engine],
):
    engine = make_engine(num_kv_blocks=12)
    tensor = engine.kv_cache.tensor
    tensor.fill_(float("nan"))
    reservation = engine.reserve(make_request("r", PROMPT))
    assert reservation is not None
    filled, not_filled = reservation.block_ids[:2], reservation.block_ids[2:]
    assert len(not_filled) == 1
    assert not tensor[not_filled].any()
    assert bool(tensor[filled].isnan().all())
    # whoever has them next computes with nothing of this
    engine.abort("r")
    engine.add_request(make_request("s", random_prompt(30)))
    engine.step()
    assert not tensor[engine.blocks_of("s")].isnan().any()


def test_one_row_that_cannot_be_sampled_spares_its_neighbours(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    def sample_unless_bad(logits: Any, rows: Any) -> Any:
        if any(row.params.seed == 13 for row in rows):
            raise RuntimeError("cannot draw")
        return sample(logits, rows)

    engine = make_engine()
    expected = generate(engine, make_request("probe", PROMPT))
    monkeypatch.setattr("engine.step.sample", sample_unless_bad)
    for name, seed in (("good", 1), ("bad", 13), ("fine", 2)):
        engine.add_request(make_request(name, PROMPT, seed=seed))
    outputs = run(engine)
    assert last(outputs, "bad").finish_reason is FinishReason.ERROR
    assert "cannot draw" in (last(outputs, "bad").error or "")
    tokens = tokens_by_request(outputs)
    assert (tokens["good"], tokens["bad"], tokens["fine"]) == (expected, [], expected)
    assert_empty(engine)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_what_fails_after_the_forward_fails_one_request(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, num_choices: int
):
    def check_end(request: Request, **limits: Any) -> Any:
        if request.request_id == "bad" and request.num_output_tokens == 3:
            raise RuntimeError("cannot end")
        return finish_reason(request, **limits)

    engine = make_engine()
    expected = generate(engine, make_request("probe", PROMPT))
    monkeypatch.setattr("engine.live_requests.finish_reason", check_end)
    engine.add_request(make_request("bad", PROMPT, num_choices=num_choices))
    engine.add_request(make_request("good", PROMPT))
    outputs = run(engine)
    ends = [each for each in outputs if each.request_id == "bad" and each.finish_reason]
    assert {each.choice_index for each in ends} == set(range(num_choices))
    assert {each.finish_reason for each in ends} == {FinishReason.ERROR}
    assert tokens_by_request(outputs)["good"] == expected
    assert_empty(engine)


def test_a_fork_that_fails_ends_all_its_choices_once(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine()
    expected = generate(engine, make_request("probe", PROMPT))

    def fail(copies: Any) -> None:
        raise RuntimeError("cannot copy")

    monkeypatch.setattr(engine.kv_cache, "copy", fail)
    engine.add_request(make_request("bad", PROMPT, num_choices=3))
    engine.add_request(make_request("good", PROMPT))
    outputs = run(engine)
    ends = [(each.choice_index, each.finish_reason) for each in outputs if each.request_id == "bad"]
    assert sorted(ends) == [(index, FinishReason.ERROR) for index in range(3)]
    assert tokens_by_request(outputs)["good"] == expected
    assert_empty(engine)


def test_prompt_logprobs_are_told_once_though_the_choices_are_preempted(
    make_engine: Callable[..., Engine],
):
    engine = make_engine(num_kv_blocks=9)
    asked = make_request("r", PROMPT, max_tokens=20, num_choices=3, num_prompt_logprobs=0)
    engine.add_request(asked)
    outputs = run(engine)
    told = [each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None]
    positions = [p for piece in told for p in range(piece.start_position, piece.end_position)]
    assert engine.load().num_preemptions > 0
    assert positions == list(range(1, len(PROMPT)))


def test_a_prompt_in_pieces_says_nothing_while_short_ones_decode(
    make_engine: Callable[..., Engine],
):
    prompts = {f"short-{length}": random_prompt(length) for length in (3, 5, 6)}
    prompts["long"] = random_prompt(100)
    solo = make_engine()
    expected = {
        name: generate(solo, make_request(name, prompt, cache_salt=name))
        for name, prompt in prompts.items()
    }
    engine = make_engine(max_num_batched_tokens=16)
    for name, prompt in prompts.items():
        engine.add_request(make_request(name, prompt))
    steps: list[list[RequestOutput]] = []
    while engine.has_work():
        steps.append(engine.step().outputs)
    assert tokens_by_request([each for outputs in steps for each in outputs]) == expected
    for outputs in steps:
        for output in outputs:
            is_computed = output.num_computed_tokens >= len(prompts[output.request_id])
            assert bool(output.token_ids) == is_computed
    # Once a short one has begun it gets a token in every step, whatever the long one does.
    for name in ("short-3", "short-5", "short-6"):
        speaks = [any(o.request_id == name and o.token_ids for o in outputs) for outputs in steps]
        first, last_one = speaks.index(True), len(speaks) - speaks[::-1].index(True)
        assert all(speaks[first:last_one])


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 1e-5, 1e-4, 1e-3])
def test_a_tiny_temperature_is_like_none(make_engine: Callable[..., Engine], temperature: float):
    engine = make_engine()
    greedy = generate(engine, make_request("greedy", PROMPT))
    assert generate(engine, make_request("r", PROMPT, temperature=temperature)) == greedy
