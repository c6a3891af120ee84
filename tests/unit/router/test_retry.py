import contextlib
import random

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from router.config import RouterConfig
from router.errors import GenerationFailed, InvalidRequest, RequestTimeout
from router.failures import failure_of, raise_if_final
from router.retry import MAX_UNREACHED, Failure, RetryBudget
from router.retry_quota import FLOOR, FLOOR_PER_S, SHARE, RetryQuota
from router.worker_view import WorkerKey
from rpc import errors
from rpc.status import to_status
from tests.fakes import FakeClock

KEY = WorkerKey("decode-0", 1)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def budget(limit: int = 3, quota: RetryQuota | None = None) -> RetryBudget:
    config = RouterConfig(migration_limit=limit)
    return RetryBudget(config, random.Random(1), quota or RetryQuota(FakeClock()))


def failure(cause: str, *, was_admitted: bool) -> Failure:
    return Failure(cause=cause, message="m", was_admitted=was_admitted, workers=frozenset({KEY}))


def told(error: Exception) -> AioRpcError:
    parts = to_status(error)
    return AioRpcError(
        parts.code, Metadata(), Metadata(*parts.trailing_metadata), details=parts.details
    )


def transport(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details=details)


def test_failures_after_admission_are_bounded() -> None:
    spent = budget(2)
    for _ in range(2):
        assert spent.spend(failure("lost", was_admitted=True)) == 0.0
    assert spent.excluded == {KEY}
    with pytest.raises(GenerationFailed):
        spent.spend(failure("lost", was_admitted=True))


def test_choices_that_go_on_alone_share_the_workers_they_may_take_down() -> None:
    spent = budget(2)
    spent.spend(failure("lost", was_admitted=True))
    forks = [spent.fork() for _ in range(3)]
    # The same worker lost to all of them is one worker.
    second = frozenset({WorkerKey("decode-1", 1)})
    for fork in forks:
        lost = Failure(cause="lost", message="m", was_admitted=True, workers=second)
        assert fork.spend(lost) == 0.0
        assert fork.num_failures == 2
    third = frozenset({WorkerKey("decode-2", 1)})
    with pytest.raises(GenerationFailed, match="3 workers"):
        forks[0].spend(Failure(cause="lost", message="m", was_admitted=True, workers=third))


def test_a_drain_is_free() -> None:
    spent = budget(0)
    for _ in range(10):
        assert spent.spend(failure("migrate", was_admitted=True)) == 0.0


def test_errors_are_retried_after_a_pause_that_no_two_requests_share() -> None:
    quota = RetryQuota(FakeClock())
    pauses = set()
    for seed in range(5):
        spent = RetryBudget(RouterConfig(), random.Random(seed), quota)
        pauses |= {spent.spend(failure("error", was_admitted=True)) for _ in range(2)}
    assert len(pauses) == 10
    assert all(0 < pause_s <= 0.02 for pause_s in pauses)


def test_a_storm_of_errors_is_retried_for_a_fifth_of_the_requests_and_a_few_on_top() -> None:
    quota, num_requests, num_retries = RetryQuota(FakeClock()), 500, 0
    for _ in range(num_requests):
        spent = budget(3, quota)
        with contextlib.suppress(GenerationFailed):
            while True:
                spent.spend(failure("error", was_admitted=True))
                num_retries += 1
    assert 0 < num_retries <= SHARE * num_requests + FLOOR


def test_lost_workers_cost_the_quota_nothing_and_calm_gives_it_back() -> None:
    clock = FakeClock()
    quota = RetryQuota(clock)
    for _ in range(1000):
        for cause in ("lost", "transfer", "migrate"):
            budget(3, quota).spend(failure(cause, was_admitted=True))
    while quota.take():
        pass
    clock.advance(3.0 / FLOOR_PER_S)
    assert [quota.take() for _ in range(4)] == [True, True, True, False]


def test_refusals_pause_longer_and_longer_but_never_end_it() -> None:
    spent = budget(0)
    pauses = [spent.spend(failure("refused", was_admitted=False)) for _ in range(100)]
    assert pauses[0] <= 0.01
    assert 0.25 <= pauses[-1] <= 0.5
    assert not spent.excluded


def test_unreachable_workers_end_it_at_last() -> None:
    spent = budget(0)
    for _ in range(MAX_UNREACHED):
        spent.spend(failure("stale", was_admitted=False))
    with pytest.raises(GenerationFailed):
        spent.spend(failure("unreachable", was_admitted=False))


@pytest.mark.parametrize(
    ("error", "has_answered", "cause", "was_admitted"),
    [
        (told(errors.AdmissionRefusedError("full")), False, "refused", False),
        (told(errors.StaleWorkerError("other")), False, "stale", False),
        (told(errors.DrainingError("drains")), False, "unreachable", False),
        (told(errors.WorkerUnavailableError("drains")), True, "lost", True),
        (told(errors.TransferLostError("link")), True, "transfer", True),
        (told(errors.RequestFailedError("nan")), True, "error", True),
        (told(errors.InvalidRequestError("id")), False, "invalid", True),
        (transport(UNAVAILABLE, "failed to connect to all"), False, "unreachable", False),
        (transport(UNAVAILABLE, "Socket closed"), False, "lost", True),
        (transport(UNAVAILABLE, "Socket closed"), True, "lost", True),
        (transport(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline"), True, "deadline", True),
    ],
)  # fmt: skip
def test_what_a_failed_call_means(
    error: AioRpcError, has_answered: bool, cause: str, was_admitted: bool
) -> None:
    result = failure_of(error, KEY, has_answered=has_answered)
    assert (result.cause, result.was_admitted) == (cause, was_admitted)


def test_only_invalid_requests_and_passed_deadlines_are_final() -> None:
    raise_if_final(failure("lost", was_admitted=True), time_left_s=1.0)
    with pytest.raises(InvalidRequest):
        raise_if_final(failure("invalid", was_admitted=True), time_left_s=1.0)
    with pytest.raises(RequestTimeout):
        raise_if_final(failure("lost", was_admitted=True), time_left_s=0.0)
    with pytest.raises(RequestTimeout):
        raise_if_final(failure("deadline", was_admitted=True), time_left_s=0.01)
