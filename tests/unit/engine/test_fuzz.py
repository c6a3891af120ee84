"""Random requests and aborts in a tiny pool: each request equals its solo run."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import FinishReason
from tests.unit.engine.conftest import generate, make_request, run, tokens_by_request

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
            }
        )
    return plan


@pytest.mark.parametrize("seed", range(3))
def test_every_output_equals_its_solo_run(make_engine: Callable[..., Engine], seed: int):
    plan = make_plan(seed)
    chance = random.Random(1000 + seed)
    engine = make_engine(num_kv_blocks=14, max_num_seqs=4, max_num_batched_tokens=12)
    tokens: dict[str, list[int]] = {}
    ended: dict[str, FinishReason] = {}
    pending = list(plan)
    while pending or engine.has_work():
        if pending and chance.random() < 0.4:
            engine.add_request(make_request(**pending.pop(0)))
        outputs = engine.step().outputs
        for request_id, new in tokens_by_request(outputs).items():
            tokens.setdefault(request_id, []).extend(new)
        if chance.random() < 0.05:
            aborted = engine.abort(f"r-{chance.randrange(NUM_REQUESTS)}")
            outputs += [aborted] if aborted is not None else []
        for output in outputs:
            if output.finish_reason is not None:
                assert output.request_id not in ended
                ended[output.request_id] = output.finish_reason
        engine.check_integrity()
    assert len(ended) == NUM_REQUESTS
    solo = make_engine()
    for facts in plan:
        request_id = facts["request_id"]
        expected = generate(solo, make_request(**facts))
        got = tokens.get(request_id, [])
        is_aborted = ended[request_id] is FinishReason.ABORT
        assert got == (expected[: len(got)] if is_aborted else expected), facts
    counts = engine.block_counts()
    assert counts.free + counts.cached == counts.total
    assert run(engine) == []
