"""Random requests and aborts in a tiny pool: each choice of each request equals its solo run.

A short form in every run of the tests, the long one by `make soak SEED=1`.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import FinishReason
from tests.long_form import IS_LONG
from tests.unit.engine.conftest import make_request
from tests.unit.engine.random_requests import Choice, Outcome, choices_of, make_specs

NUM_REQUESTS = 2000 if IS_LONG else 70
SEED = int(os.environ.get("RELEVO_SOAK_SEED", "1"))
MAX_WAITING = 6
MAX_STEPS_ALONE = 1000


def serve_together(engine: Engine, specs: list[dict[str, Any]], seed: int) -> dict[Choice, Outcome]:
    """Let requests come and go away at random moments."""
    chance = random.Random(seed)
    outcomes: dict[Choice, Outcome] = {}
    for spec in specs:
        told: list[float] = []
        outcomes |= {choice: Outcome(prompt_logprobs=told) for choice in choices_of(spec)}
    pending = list(reversed(specs))
    open_choices: list[Choice] = []
    while pending or engine.has_work():
        if pending and engine.load().num_waiting < MAX_WAITING and chance.random() < 0.5:
            open_choices += choices_of(pending[-1])
            engine.add_request(make_request(**pending.pop()))
        outputs = engine.step().outputs
        if open_choices and chance.random() < 0.02:
            outputs += engine.abort(chance.choice(open_choices)[0])
        if open_choices and chance.random() < 0.02:
            outputs += engine.abort_choice(*chance.choice(open_choices))
        for output in outputs:
            choice = (output.request_id, output.choice_index)
            outcomes[choice].add(output)
            if output.finish_reason is not None:
                open_choices.remove(choice)
        engine.check_integrity()
    return outcomes


def serve_alone(engine: Engine, spec: dict[str, Any], choice_index: int) -> Outcome:
    """Serve one choice on an empty engine, and nothing of it from the cache."""
    outcome = Outcome()
    alone = {"cache_salt": f"{spec['request_id']}-{choice_index}", "priority": 0}
    alone |= {"choice_index": choice_index, "num_choices": 1}
    engine.add_request(make_request(**{**spec, **alone}))
    for _ in range(MAX_STEPS_ALONE):
        if not engine.has_work():
            return outcome
        for output in engine.step().outputs:
            outcome.add(output)
    raise AssertionError(f"no end of {spec}")


@pytest.mark.soak
def test_every_output_equals_its_solo_run(make_engine: Callable[..., Engine]):
    specs = make_specs(NUM_REQUESTS, seed=SEED)
    engine = make_engine(num_kv_blocks=14, max_num_seqs=4, max_num_batched_tokens=12)
    outcomes = serve_together(engine, specs, SEED)
    solo = make_engine()
    wrong = []
    for spec in specs:
        for choice in choices_of(spec):
            got, expected = outcomes[choice], serve_alone(solo, spec, choice[1])
            if not got.agrees_with(expected):
                wrong.append((spec, choice[1], got, expected))
    assert not wrong, f"{len(wrong)} of {len(outcomes)} differ, such as {wrong[0]}"
    ends = [outcome.finish_reason for outcome in outcomes.values()]
    assert ends.count(FinishReason.ABORT) > 0
    assert ends.count(FinishReason.ERROR) == 0
    assert engine.load().num_preemptions > 0
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total
