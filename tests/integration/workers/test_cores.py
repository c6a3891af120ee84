"""The engine of a worker keeps to cores, once others of its node have let them go."""

import asyncio
import os
import uuid
from functools import partial
from pathlib import Path
from threading import get_native_id

import pytest

from tests.patience import NAP_S, naps
from tests.worker_pair import worker_pair
from workers import worker
from workers.core_claim import CoreClaim


async def test_a_worker_waits_for_cores_and_then_keeps_to_them(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = partial(CoreClaim, namespace=f"relevo.test.{uuid.uuid4().hex}")
    monkeypatch.setattr(worker, "CoreClaim", claims)
    monkeypatch.setattr(worker, "CLAIM_PAUSES_S", (0.05, 0.1))
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this machine has one core")
    others = claims(len(allowed))
    assert others.try_claim()
    async with worker_pair(tmp_path, model_path, both={"engine": {"num_threads": 1}}) as pair:
        loops = [each._engine_loop for each in (*pair.prefill, *pair.decode)]

        async def cores() -> list[set[int]]:
            ids = [await loop.call(lambda _: get_native_id()) for loop in loops]
            return [os.sched_getaffinity(each) for each in ids]

        assert await cores() == [allowed, allowed]
        others.release()
        for _ in naps(20.0):
            if all(len(each) == 1 for each in await cores()):
                break
            await asyncio.sleep(NAP_S)
        prefill, decode = await cores()
        assert len(prefill) == len(decode) == 1
        assert not prefill & decode
