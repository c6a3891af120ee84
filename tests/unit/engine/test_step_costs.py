"""What a further request, and a further token of KV, adds to a step."""

import random

import pytest

from engine.step_costs import StepCosts


def taught(request_s: float, kv_token_s: float, *, steps: int = 2000, noise: float = 0.0):
    costs, rng = StepCosts(), random.Random(1)
    for _ in range(steps):
        num_requests = rng.randint(1, 16)
        num_kv_tokens = sum(rng.randint(100, 4000) for _ in range(num_requests))
        duration_s = 0.02 + request_s * num_requests + kv_token_s * num_kv_tokens
        costs.observe(
            num_requests=num_requests,
            num_kv_tokens=num_kv_tokens,
            duration_s=duration_s * (1.0 + rng.uniform(-noise, noise)),
        )
    return costs


def test_both_costs_are_found():
    request_s, kv_token_s = taught(1e-3, 2e-7).marginal()
    assert request_s == pytest.approx(1e-3, rel=0.05)
    assert kv_token_s == pytest.approx(2e-7, rel=0.05)


def test_noise_does_not_make_them_negative():
    for noise in (0.1, 0.5, 0.9):
        assert min(taught(1e-4, 1e-9, noise=noise).marginal()) >= 0.0


def test_what_never_varied_is_unknown():
    costs = StepCosts()
    assert costs.marginal() == (0.0, 0.0)
    for _ in range(100):
        costs.observe(num_requests=3, num_kv_tokens=900, duration_s=0.03)
    assert costs.marginal() == (0.0, 0.0)


def test_a_batch_of_constant_size_still_tells_the_cost_of_its_growing_kv():
    costs = StepCosts()
    for step in range(1000):
        tokens = 4 * (100 + step)
        costs.observe(num_requests=4, num_kv_tokens=tokens, duration_s=0.02 + 1e-6 * tokens)
    request_s, kv_token_s = costs.marginal()
    assert request_s == 0.0
    assert kv_token_s == pytest.approx(1e-6, rel=0.05)


def test_a_change_of_the_machine_is_learnt():
    costs, rng = taught(1e-3, 0.0), random.Random(2)
    for _ in range(1000):
        number = rng.randint(1, 16)
        costs.observe(num_requests=number, num_kv_tokens=100, duration_s=0.02 + 3e-3 * number)
    assert costs.marginal()[0] == pytest.approx(3e-3, rel=0.1)


def test_a_step_that_was_held_up_counts_for_little():
    costs = taught(1e-3, 0.0)
    costs.observe(num_requests=16, num_kv_tokens=100, duration_s=60.0)
    assert costs.marginal()[0] < 5e-3
