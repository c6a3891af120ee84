"""What a key may still use."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError, Verdict
from api.quotas import UNLIMITED, Allowance, Quota
from tests.fakes import FakeClock


def wait_s(allowance: Allowance) -> float:
    """How long it asks to wait; 0: it let the call in."""
    try:
        allowance.admit()
    except ApiError as error:
        return error.retry_after_s if error.verdict is Verdict.QUOTA_EXCEEDED else math.nan
    return 0.0


def test_a_minute_s_requests_may_come_at_once_and_then_one_by_one() -> None:
    clock = FakeClock()
    allowance = Allowance(Quota(requests_per_minute=6), now=clock)
    assert [wait_s(allowance) for _ in range(6)] == [0.0] * 6
    assert wait_s(allowance) == pytest.approx(10.0)
    clock.advance(9.9)
    assert wait_s(allowance) == pytest.approx(0.1)
    clock.advance(0.2)
    assert wait_s(allowance) == 0.0
    assert wait_s(allowance) > 9.0


def test_overdrawn_tokens_are_paid_back_first() -> None:
    clock = FakeClock()
    allowance = Allowance(Quota(tokens_per_minute=60), now=clock)
    allowance.admit()
    allowance.charge(50)
    allowance.admit()
    allowance.charge(40)
    assert wait_s(allowance) == pytest.approx(31.0)
    clock.advance(31.1)
    assert wait_s(allowance) == 0.0


def test_a_quota_below_one_a_minute_opens_now_and_then() -> None:
    clock = FakeClock()
    allowance = Allowance(Quota(requests_per_minute=0.5), now=clock)
    assert wait_s(allowance) == 0.0
    assert wait_s(allowance) == pytest.approx(120.0)
    clock.advance(121.0)
    assert wait_s(allowance) == 0.0


def test_without_a_quota_nothing_is_refused() -> None:
    for _ in range(100):
        UNLIMITED.admit()
        UNLIMITED.charge(10**9)


@given(
    quota=st.floats(0.5, 100.0),
    gaps_s=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=60),
)
def test_no_more_than_two_minutes_worth_in_any_minute(quota: float, gaps_s: list[float]) -> None:
    clock = FakeClock()
    allowance = Allowance(Quota(requests_per_minute=quota), now=clock)
    admitted_s: list[float] = []
    for gap_s in gaps_s:
        clock.advance(gap_s)
        if wait_s(allowance) == 0.0:
            admitted_s.append(clock())
    for start_s in admitted_s:
        inside = [at_s for at_s in admitted_s if start_s <= at_s < start_s + 60.0]
        assert len(inside) <= 2 * quota + 2
