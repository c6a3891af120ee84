"""What the engine learns about its own speed."""

import pytest

from engine.rates import Rates
from tests.fakes import FakeClock


def teach(rates: Rates, *, decode_s: float, tokens_per_s: float, times: int = 40) -> None:
    for _ in range(times):
        rates.observe(num_decodes=1, num_chunk_tokens=0, duration_s=decode_s)
        rates.observe(num_decodes=1, num_chunk_tokens=256, duration_s=decode_s + 256 / tokens_per_s)


def test_nothing_is_known_at_first():
    rates = Rates()
    assert rates.predict_s(num_decodes=3, num_chunk_tokens=100) == 0.0
    assert rates.max_chunk_tokens(num_decodes=0, limit_s=1.0) is None


def test_decodes_and_prompt_tokens_are_told_apart():
    rates = Rates()
    teach(rates, decode_s=0.05, tokens_per_s=1000.0)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.01)
    assert rates.predict_s(num_decodes=1, num_chunk_tokens=0) == pytest.approx(0.05)
    assert rates.predict_s(num_decodes=1, num_chunk_tokens=500) == pytest.approx(0.55, rel=0.01)


def test_chunks_are_sized_for_the_limit():
    rates = Rates()
    teach(rates, decode_s=0.1, tokens_per_s=1000.0)
    assert rates.max_chunk_tokens(num_decodes=1, limit_s=1.0) == pytest.approx(900, rel=0.02)


def test_a_slow_machine_still_gets_chunks_worth_their_step():
    rates = Rates()
    teach(rates, decode_s=2.0, tokens_per_s=10.0)
    assert rates.max_chunk_tokens(num_decodes=1, limit_s=1.0) == 32


def test_small_chunks_do_not_talk_the_rate_down():
    """A step of 32 tokens on a machine with a fixed cost of 0.1 s must not look like 160/s."""
    rates = Rates()
    teach(rates, decode_s=0.1, tokens_per_s=320.0)
    for _ in range(50):
        rates.observe(num_decodes=0, num_chunk_tokens=32, duration_s=0.2)
    assert rates.prefill_tokens_per_s == pytest.approx(320.0, rel=0.02)


def test_the_newest_observations_win_after_a_while():
    rates = Rates()
    teach(rates, decode_s=0.1, tokens_per_s=1000.0)
    teach(rates, decode_s=0.2, tokens_per_s=500.0)
    assert rates.decode_step_s(1) == pytest.approx(0.2, rel=0.01)
    assert rates.prefill_tokens_per_s == pytest.approx(500.0, rel=0.02)


def test_batch_sizes_nobody_saw_borrow_from_the_nearest():
    rates = Rates()
    rates.observe(num_decodes=1, num_chunk_tokens=0, duration_s=0.1)
    rates.observe(num_decodes=16, num_chunk_tokens=0, duration_s=0.4)
    assert rates.decode_step_s(2) == 0.1
    assert rates.decode_step_s(8) == 0.4
    assert rates.decode_step_s(100) == 0.4


def test_only_a_prompt_teaches_how_fast_prompts_are():
    clock = FakeClock()
    rates = Rates(now=clock)
    rates.observe(num_decodes=0, num_chunk_tokens=256, duration_s=0.1)
    clock.advance(7.0)
    rates.observe(num_decodes=4, num_chunk_tokens=0, duration_s=0.1)
    assert rates.learnt_at_s == clock() - 7.0
    rates.observe(num_decodes=4, num_chunk_tokens=256, duration_s=0.1)
    assert rates.learnt_at_s == clock()
