"""Steps launched while the one before them runs: the same tokens, and every block accounted for."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.batch import Batch
from engine.engine import Engine
from engine.flight import Flight
from engine.paged import stepper
from engine.paged.sampling import needs_no_tokens
from engine.request import FinishReason, RequestOutput, RequestStatus
from engine.step_runner import StepRunner
from tests.paged_kernel import offer_kernel
from tests.tiny_model import VOCAB_SIZE
from tests.unit.engine.conftest import make_request, random_prompt, run, tokens_by_request
from tests.unit.engine.random_requests import Choice, Outcome, choices_of, make_specs
from tests.unit.engine.test_fuzz import serve_alone

NUM_REQUESTS = 30


@pytest.fixture
def launched_ahead(monkeypatch: pytest.MonkeyPatch) -> list[Flight]:
    """Every step that was launched behind another one."""
    flights: list[Flight] = []
    launch = StepRunner._launch_ahead

    def noting(self: StepRunner, *arguments: Any) -> Flight | None:
        flight = launch(self, *arguments)
        flights.extend([] if flight is None else [flight])
        return flight

    monkeypatch.setattr(StepRunner, "_launch_ahead", noting)
    return flights


def mostly_plain_specs(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    specs = make_specs(NUM_REQUESTS, seed=seed)
    kept = {"request_id", "token_ids", "max_tokens", "priority", "cache_salt", "ignore_eos", "seed"}
    kept |= {"temperature", "top_k", "top_p", "min_p", "stop_token_ids", "num_choices"}
    for spec in specs:
        if chance.random() < 0.85:
            for name in spec.keys() - kept:
                del spec[name]
            spec["num_choices"] = 1
            # A token in twelve ends it, when the step behind is launched already.
            spec["stop_token_ids"] = tuple(range(chance.randrange(3, 15), VOCAB_SIZE, 12))
    return specs


def with_landed(engine: Engine, outputs: list[RequestOutput]) -> list[RequestOutput]:
    """What a verb says, after the step that had to land before it."""
    return [output for step in engine.take_landed() for output in step.outputs] + outputs


def serve_together(engine: Engine, specs: list[dict[str, Any]], seed: int) -> dict[Choice, Outcome]:
    """Let requests come, and some go away, at random moments."""
    chance = random.Random(seed)
    outcomes: dict[Choice, Outcome] = {}
    for spec in specs:
        told: list[float] = []
        outcomes |= {choice: Outcome(prompt_logprobs=told) for choice in choices_of(spec)}
    pending, open_choices = list(reversed(specs)), []
    while pending or engine.has_work():
        if pending and engine.load().num_waiting < 4 and chance.random() < 0.1:
            open_choices += choices_of(pending[-1])
            engine.add_request(make_request(**pending.pop()))
        outputs = engine.step().outputs
        if open_choices and chance.random() < 0.02:
            request_id, index = chance.choice(open_choices)
            ended = engine.abort_choice(request_id, index)
            if chance.random() < 0.5:
                ended += engine.abort(request_id)
            outputs += with_landed(engine, ended)
        for output in outputs:
            choice = (output.request_id, output.choice_index)
            outcomes[choice].add(output)
            if output.finish_reason is not None:
                open_choices.remove(choice)
        engine.check_integrity()
    return outcomes


@pytest.mark.parametrize(("seed", "num_kv_blocks"), [(1, 40), (2, 14)])
def test_every_output_equals_its_solo_run(
    make_engine: Callable[..., Engine],
    make_paged_engine: Callable[..., Engine],
    launched_ahead: list[Flight],
    seed: int,
    num_kv_blocks: int,
):
    specs = mostly_plain_specs(seed)
    engine = make_paged_engine(
        num_kv_blocks=num_kv_blocks, max_num_seqs=4, max_num_batched_tokens=12
    )
    engine.warm_up()
    outcomes = serve_together(engine, specs, seed)
    solo = make_engine(attention="torch")
    for spec in specs:
        for choice in choices_of(spec):
            expected = serve_alone(solo, spec, choice[1])
            assert outcomes[choice].tokens == expected.tokens[: len(outcomes[choice].tokens)]
            if outcomes[choice].finish_reason is not FinishReason.ABORT:
                assert outcomes[choice].agrees_with(expected), (spec, outcomes[choice], expected)
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total
    ends = [outcome.finish_reason for outcome in outcomes.values()]
    assert ends.count(FinishReason.STOP) > 0
    assert ends.count(FinishReason.ERROR) == 0
    assert len(launched_ahead) > 20


def test_a_step_ahead_is_launched_before_the_one_before_it_is_read(
    make_paged_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    told: list[str] = []
    read, launch = stepper._read, stepper.PagedStepper.launch
    monkeypatch.setattr(stepper, "_read", lambda *a: (told.append("read"), read(*a))[1])
    monkeypatch.setattr(
        stepper.PagedStepper, "launch", lambda *a: (told.append("launch"), launch(*a))[1]
    )
    engine = make_paged_engine()
    engine.add_request(make_request("r", random_prompt(9), max_tokens=4))
    run(engine)
    # the last token's step is known to be the last: none is launched behind it
    assert told == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_the_token_behind_the_last_one_is_dropped(make_paged_engine: Callable[..., Engine]):
    engine = make_paged_engine()
    prompts = {"stops": random_prompt(9), "goes on": random_prompt(20)}
    for name, prompt in prompts.items():
        engine.add_request(make_request(name, prompt, max_tokens=12))
    whole = tokens_by_request(run(engine))
    stop = whole["stops"][5]
    engine.add_request(make_request("stops", prompts["stops"], stop_token_ids=(stop,)))
    engine.add_request(make_request("goes on", prompts["goes on"]))
    outputs = run(engine)
    tokens = tokens_by_request(outputs)
    assert tokens["stops"] == whole["stops"][: whole["stops"].index(stop) + 1]
    assert tokens["goes on"] == whole["goes on"]
    assert sum(output.finish_reason is not None for output in outputs) == 2


def test_a_verb_that_moves_blocks_waits_for_the_device(
    make_paged_engine: Callable[..., Engine], launched_ahead: list[Flight]
):
    engine = make_paged_engine()
    engine.add_request(make_request("r", random_prompt(9), max_tokens=9))
    engine.step()
    assert len(launched_ahead) == 1
    engine.add_request(make_request("later", random_prompt(5)))
    assert engine.take_landed() == [], "who only waits disturbs nobody"
    [ended] = engine.abort("r")
    assert ended.finish_reason is FinishReason.ABORT
    [landed] = engine.take_landed()
    assert [len(output.token_ids) for output in landed.outputs] == [1]
    assert ended.start_position == landed.outputs[0].start_position + 1
    counts = engine.block_counts()
    assert counts.used == 0
    assert tokens_by_request(run(engine)).keys() == {"later"}


def test_nobody_is_launched_ahead_of_what_it_needs(
    make_paged_engine: Callable[..., Engine], launched_ahead: list[Flight]
):
    for changes in ({"presence_penalty": 0.5}, {"num_choices": 2}, {"num_logprobs": 1}):
        engine = make_paged_engine()
        engine.add_request(make_request("plain", random_prompt(9)))
        engine.add_request(make_request("r", random_prompt(7), **changes))
        run(engine)
        ran = [entry.request for flight in launched_ahead for entry in flight.schedule.scheduled]
        if "num_choices" in changes:
            assert all(request.num_choices == 1 for request in ran)
        else:
            assert not any(request.request_id == "r" for request in ran)
        launched_ahead.clear()


def test_nobody_is_preempted_for_a_step_ahead(
    make_engine: Callable[..., Engine],
    make_paged_engine: Callable[..., Engine],
    launched_ahead: list[Flight],
):
    prompts = {f"r{n}": random_prompt(15, seed=n) for n in range(2)}
    small = make_paged_engine(num_kv_blocks=7)  # 56 tokens, where both come to 80
    for name, prompt in prompts.items():
        small.add_request(make_request(name, prompt, max_tokens=25))
    tokens = tokens_by_request(run(small))
    assert small.load().num_preemptions > 0
    assert not any(flight.schedule.num_preemptions for flight in launched_ahead)
    assert len(launched_ahead) > 10
    large = make_engine(attention="torch")
    for name, prompt in prompts.items():
        large.add_request(make_request(name, prompt, max_tokens=25))
    assert tokens == tokens_by_request(run(large))


def test_it_can_be_switched_off(
    make_paged_engine: Callable[..., Engine], launched_ahead: list[Flight]
):
    engine = make_paged_engine(run_ahead=False)
    engine.add_request(make_request("r", random_prompt(9)))
    assert len(tokens_by_request(run(engine))["r"]) == 12
    assert launched_ahead == []


def test_a_hand_over_runs_no_further(
    make_paged_engine: Callable[..., Engine], launched_ahead: list[Flight]
):
    engine = make_paged_engine()
    engine.add_request(make_request("r", random_prompt(9), hand_over=True))
    run(engine)
    assert launched_ahead == []
    assert engine.block_counts().held == 2
    engine.release("r")


def leave_logits_in_one_place(engine: Engine) -> None:
    """As a graph does: the logits of a step are overwritten by the next one's."""
    forward = engine._runner.forward
    place = torch.empty(8, engine.vocab_size, dtype=torch.float64)

    def forward_into_place(batch: Batch) -> torch.Tensor:
        logits = forward(batch)
        return place[: len(logits)].copy_(logits)

    engine._launcher._stepper._forward = forward_into_place


def test_a_guess_that_was_wrong_costs_a_step_and_no_token(
    make_engine: Callable[..., Engine],
    make_paged_engine: Callable[..., Engine],
    launched_ahead: list[Flight],
):
    # So flat that top-p reaches beyond the likeliest few: the sampler has the last word.
    request = {"temperature": 2.0, "top_p": 0.99, "seed": 11, "max_tokens": 12}
    tokens = []
    paged = make_paged_engine()
    leave_logits_in_one_place(paged)
    for engine in (make_engine(attention="torch"), paged):
        engine.add_request(make_request("r", random_prompt(9), **request))
        engine.add_request(make_request("greedy", random_prompt(6)))
        tokens.append(tokens_by_request(run(engine)))
    assert tokens[0] == tokens[1]
    assert any(flight.mistaken for flight in launched_ahead)


def test_a_step_that_fails_ahead_fails_its_own_and_the_engine_serves_on(
    make_paged_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = make_paged_engine()
    engine.add_request(make_request("r", random_prompt(9)))
    forward = engine._runner.forward
    calls: Iterator[int] = iter(range(99))

    def fail_at_second(batch: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return forward(batch)

    monkeypatch.setattr(engine._launcher._stepper, "_forward", fail_at_second)
    outputs = run(engine)
    assert [output.error for output in outputs if output.finish_reason] == [
        "RuntimeError: out of memory"
    ]
    assert len(tokens_by_request(outputs)["r"]) == 1
    engine.add_request(make_request("next", random_prompt(9)))
    assert len(tokens_by_request(run(engine))["next"]) == 12


_QUESTIONS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique"}


class _NoQuestions(TorchDispatchMode):
    """Whatever makes the host wait for a number is an error."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        assert name not in _QUESTIONS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_a_launch_asks_the_device_nothing(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    def silent(layer: Any, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query

    offer_kernel(monkeypatch)
    engine = make_engine(attention="paged", cuda_graphs=False)
    monkeypatch.setattr(engine._runner.paged, "_kernel", silent)
    launch = stepper.PagedStepper.launch
    launched = []

    def launch_silently(*arguments: Any) -> Any:
        launched.append(arguments)
        with _NoQuestions():
            return launch(*arguments)

    monkeypatch.setattr(stepper.PagedStepper, "launch", launch_silently)
    for n, changes in enumerate(({}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.9})):
        engine.add_request(make_request(f"r{n}", random_prompt(20 + n), **changes))
    outputs = run(engine)
    assert len(launched) > 10
    assert not any(output.error for output in outputs)


def test_needs_no_tokens_agrees_with_what_is_launched(make_paged_engine: Callable[..., Engine]):
    engine = make_paged_engine()
    request = make_request("r", random_prompt(9), min_tokens=3, max_tokens=6)
    assert not needs_no_tokens(request)
    engine.add_request(request)
    assert len(tokens_by_request(run(engine))["r"]) == 6
    assert request.status is RequestStatus.FINISHED
