"""Random requests and aborts in a tiny pool: each choice of each request equals its solo run."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import FinishReason
from tests.unit.engine.conftest import generate, make_request, run

NUM_REQUESTS = 24


def make_plan(seed: int) -> list[dict[str, Any]]:
    """Requests whose prompts share prefixes, so that blocks are shared and evicted."""
    chance = random.Random(seed)
    stems = [[chance.randrange(3, 320) for _ in range(40)] for _ in range(3)]
    plan = []
    for number in range(NUM_REQUESTS):
        stem = chance.choice(stems)[: chance.randrange(1, 40)]
        tail = [chance.randrange(3, 320) for _ in range(chance.randrange(0, 12))]
        plan.append(
            {
                "request_id": f"r-{number}",
                "token_ids": stem + tail,
                "max_tokens": chance.randrange(1, 16),
                "temperature": chance.choice([0.0, 1.0]),
                "seed": number,
                "cache_salt": chance.choice(["", "", "salt"]),
                "num_choices": chance.choice([1, 1, 1, 2, 3]),
            }
        )
    return plan


@pytest.mark.parametrize("seed", range(3))
def test_every_output_equals_its_solo_run(make_engine: Callable[..., Engine], seed: int):
    plan = make_plan(seed)
    chance = random.Random(1000 + seed)
    engine = make_engine(num_kv_blocks=14, max_num_seqs=4, max_num_batched_tokens=12)
    tokens: dict[tuple[str, int], list[int]] = {}
    ended: dict[tuple[str, int], FinishReason] = {}
    pending = list(plan)
    while pending or engine.has_work():
        if pending and chance.random() < 0.4:
            engine.add_request(make_request(**pending.pop(0)))
        outputs = engine.step().outputs
        if chance.random() < 0.05:
            outputs += engine.abort(f"r-{chance.randrange(NUM_REQUESTS)}")
        if chance.random() < 0.05:
            outputs += engine.abort_choice(f"r-{chance.randrange(NUM_REQUESTS)}", 1)
        for output in outputs:
            choice = (output.request_id, output.choice_index)
            assert choice not in ended
            tokens.setdefault(choice, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ended[choice] = output.finish_reason
        engine.check_integrity()
    solo = make_engine()
    for facts in plan:
        for index in range(facts["num_choices"]):
            choice = (facts["request_id"], index)
            alone = make_request(**{**facts, "choice_index": index, "num_choices": 1})
            expected = generate(solo, alone)
            got = tokens.get(choice, [])
            is_aborted = ended[choice] is FinishReason.ABORT
            assert got == (expected[: len(got)] if is_aborted else expected), (facts, index)
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total
    assert run(engine) == []
