"""What the router says to a worker once nobody waits for the answer."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from router import legs
from router.legs import AttemptPlan, release_prefill


class FakeStub:
    """A prefill worker that is too busy to answer for a while."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.calls: list[tuple[int, int]] = []

    async def Release(self, request, timeout: float) -> None:  # noqa: N802
        self.calls.append((request.transfer_id, request.epoch))
        if len(self.calls) <= self.num_failures:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


def release(monkeypatch: pytest.MonkeyPatch, stub: FakeStub) -> None:
    monkeypatch.setattr(legs, "RELEASE_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(legs, "_prefill_stub", lambda worker, channels: stub)
    plan = AttemptPlan(
        request=None,
        prefill=SimpleNamespace(key=SimpleNamespace(worker_id="prefill-0")),
        decode=None,
        transfer_id=5,
        epoch=2,
        timeout_s=1.0,
    )
    asyncio.run(release_prefill(plan, None))


@pytest.mark.parametrize(("num_failures", "num_calls"), [(0, 1), (2, 3), (9, 4)])
def test_a_busy_worker_is_asked_to_release_again(
    monkeypatch: pytest.MonkeyPatch, num_failures: int, num_calls: int
) -> None:
    stub = FakeStub(num_failures)
    release(monkeypatch, stub)
    assert stub.calls == [(5, 2)] * num_calls
