import pytest

from router.typical_rates import HALF_LIFE_S, UNKNOWN_COST, StepCost, TypicalRates
from router.worker_view import DECODE, PREFILL, WorkerKey

KEYS = [WorkerKey(f"prefill-{number}", 1) for number in range(5)]


def rates_of(*told: tuple[float, float], pool: str = PREFILL) -> TypicalRates:
    rates = TypicalRates()
    for key, (tokens_per_s, age_s) in zip(KEYS, told, strict=False):
        rates.learn(key, pool, tokens_per_s, age_s)
    return rates


def test_a_fresh_rate_is_believed() -> None:
    assert rates_of((1000.0, 1.0), (4000.0, 1.0)).current(PREFILL, 300.0, 0.0) == 300.0


def test_an_old_one_drifts_to_what_the_pool_does_now() -> None:
    rates = rates_of((1000.0, 1.0), (1000.0, 2.0), (100.0, 1e6))
    assert rates.current(PREFILL, 250.0, HALF_LIFE_S) == pytest.approx(500.0)
    assert rates.current(PREFILL, 250.0, 100 * HALF_LIFE_S) == pytest.approx(1000.0)


def test_a_pool_in_which_all_is_old_learns_from_the_other() -> None:
    rates = rates_of((1000.0, 1e6))
    assert rates.current(PREFILL, 250.0, HALF_LIFE_S) == 250.0
    rates.learn(WorkerKey("decode-0", 1), DECODE, 1000.0, 0.0)
    assert rates.current(PREFILL, 250.0, HALF_LIFE_S) == pytest.approx(500.0)


def test_nothing_measured_stays_nothing_measured() -> None:
    assert rates_of((1000.0, 1.0)).current(PREFILL, 0.0, 1e6) == 0.0


def test_lost_workers_say_nothing_any_more() -> None:
    rates = rates_of((1000.0, 1.0))
    rates.forget(KEYS[0])
    assert rates.current(PREFILL, 250.0, HALF_LIFE_S) == 250.0


def test_one_strange_worker_does_not_pull_the_others() -> None:
    rates = rates_of((1000.0, 1.0), (1100.0, 1.0), (50_000.0, 1.0))
    assert rates.current(PREFILL, 1000.0, 1e6) == pytest.approx(1100.0)


def test_who_cannot_tell_what_a_step_costs_is_taken_for_the_others() -> None:
    rates, unknown = TypicalRates(), UNKNOWN_COST
    assert rates.step_cost(DECODE, unknown) == unknown
    for number, kv_token_s in enumerate((1e-8, 3e-8, 9e-8)):
        key = WorkerKey(f"decode-{number}", 1)
        rates.learn(key, DECODE, 1.0, 0.0, StepCost(1e-5 * number, kv_token_s))
    rates.learn(WorkerKey("decode-3", 1), DECODE, 1.0, 0.0, StepCost(7.0, 0.0))
    assert rates.step_cost(DECODE, unknown) == StepCost(1e-5, 3e-8)
    assert rates.step_cost(PREFILL, unknown) == unknown
    own = StepCost(0.0, 5e-8)
    assert rates.step_cost(DECODE, own) == own
    rates.forget(WorkerKey("decode-2", 1))
    assert rates.step_cost(DECODE, unknown) == StepCost(0.5e-5, 2e-8)
