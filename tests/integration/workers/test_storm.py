"""A storm over a pair of workers: clients that leave, and every fault a worker may survive.

Whatever happens, each request ends with the tokens of one engine or with an error, the links come
back, and no block is left. `RELEVO_SOAK_MINUTES` makes it long, `RELEVO_SOAK_SEED` another one.
"""

import asyncio
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from faults.plan import Fault, FaultPlan
from tests.integration.workers.solo import PROMPT, tokens_alone
from tests.worker_client import make_request, read_decode, read_prefill
from tests.worker_pair import WorkerPair, worker_pair

SOAK_MINUTES = float(os.environ.get("RELEVO_SOAK_MINUTES", "0"))
SEED = int(os.environ.get("RELEVO_SOAK_SEED", "1"))
STORM_S = 60.0 * SOAK_MINUTES or 3.0
# A lost control message stalls the pair for a ticket's deadline: the time alone may serve nobody.
MIN_SERVED = 5
# as the router, which sends nobody to a pair without a link
RELINK_S = 0.05
NUM_AT_ONCE = 6
MAX_TOKENS = 12
# of one request: its own deadline, and what its end may take on both sides
DEADLINE_S, GRACE_S = 8.0, 6.0
ACTIONS = {
    "admission": ["raise", "delay"],
    "prefill_step": ["raise", "delay", "delay"],
    "decode_step": ["raise", "delay", "delay"],
    "sample": ["raise"],
    "kv_send": ["corrupt", "raise", "delay", "drop"],
    "kv_recv": ["corrupt", "raise", "delay", "drop"],
    "control_message": ["drop", "duplicate", "delay", "drop", "duplicate"],
    "engine_heartbeat": ["delay"],
}
ENDS = {
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNKNOWN,
}


def fault_plan(rng: random.Random) -> FaultPlan:
    """Every point and action, spread over the storm."""
    num_each = 40 if SOAK_MINUTES else 2
    faults = [
        Fault(
            point=point,
            action=action,
            match={},
            after=rng.randrange(40 * num_each),
            delay_s=rng.uniform(0.0, 0.2),
        )
        for point, actions in ACTIONS.items()
        for action in actions
        for _ in range(num_each)
    ]
    return FaultPlan(faults, None)


class Storm:
    """Requests over one pair until the time is over and some were served."""

    def __init__(self, pair: WorkerPair, rng: random.Random, model_path: Path) -> None:
        self.client, self.rng = pair.client, rng
        self.expected = [
            tokens_alone(model_path, PROMPT[:length], MAX_TOKENS) for length in (9, 32, 75)
        ]
        self.outcomes: Counter[str] = Counter()
        self.ends_at = time.monotonic() + STORM_S
        self.num_started = 0

    async def one_after_another(self) -> None:
        while time.monotonic() < self.ends_at or self.outcomes["served"] < MIN_SERVED:
            self.num_started += 1
            async with asyncio.timeout(DEADLINE_S + GRACE_S):
                self.outcomes[await self.request(f"r{self.num_started}")] += 1

    async def request(self, name: str) -> str:
        """One request, whose client may leave at any time."""
        rng, transfer_id = self.rng, self.client.next_transfer_id()
        expected = rng.choice(self.expected)
        length = (9, 32, 75)[self.expected.index(expected)]
        salt = rng.choice(["", name])
        request = make_request(
            PROMPT[:length], request_id=name, max_tokens=MAX_TOKENS, cache_salt=salt
        )
        calls = [
            self.client.open_prefill(request, transfer_id=transfer_id, timeout_s=DEADLINE_S),
            self.client.open_decode(request, transfer_id=transfer_id, timeout_s=DEADLINE_S),
        ]
        reading = asyncio.gather(read_prefill(calls[0]), read_decode(calls[1]))
        if rng.random() < 0.4:
            await asyncio.sleep(rng.uniform(0.0, 0.08))
            for call in calls:
                call.cancel()
        try:
            _, decoded = await reading
        except grpc.aio.AioRpcError as error:
            for call in calls:
                call.cancel()
            await self.release(transfer_id)
            if "no link" in (error.details() or ""):
                await asyncio.sleep(RELINK_S)
            return error.code().name
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # it took too long
            await self.release(transfer_id)
            return "left"
        assert decoded.token_ids == expected, f"{name} has other tokens than an engine alone"
        return "served"

    async def release(self, transfer_id: int) -> None:
        """As the router does, whose cancelled call may have ended just before."""
        await self.client.release(transfer_id)


@pytest.mark.soak
@pytest.mark.timeout(0 if SOAK_MINUTES else 120)
@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
async def test_a_storm_leaves_nothing_behind(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    rng = random.Random(SEED)
    tight = {"kv_transfer": {"backend": backend}, "engine": {"num_kv_blocks": 40}}
    async with worker_pair(tmp_path, model_path, both=tight) as pair:
        storm = Storm(pair, rng, model_path)
        monkeypatch.setattr("faults.plan._PLAN", fault_plan(rng))
        await asyncio.gather(*(storm.one_after_another() for _ in range(NUM_AT_ONCE)))
        monkeypatch.setattr("faults.plan._PLAN", FaultPlan([], None))
        print(f"{backend}: {dict(storm.outcomes)}")  # noqa: T201
        assert set(storm.outcomes) <= {"served", "left", *(code.name for code in ENDS)}
        await pair.client.until_linked(timeout_s=20.0)
        await pair.client.until_quiet(timeout_s=GRACE_S)
        # and it serves
        request = make_request(PROMPT, request_id="after", cache_salt="after")
        _, decoded = await pair.client.run_pair(request)
        assert decoded.token_ids == tokens_alone(model_path, PROMPT, 8)
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("kv-", "abort-"))]
