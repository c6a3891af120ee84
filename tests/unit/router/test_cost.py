import pytest

from router.cost import Need, local_cost, pair_cost, slot_wait_s
from router.worker_view import LinkView, Pending
from tests.unit.router.views import LINK, decode, prefill

NEED = Need(num_tokens=1000, num_output_tokens=100)


def test_a_pair_costs_prefill_and_the_transfer_of_the_last_chunk() -> None:
    cost = pair_cost(NEED, prefill(), decode(), LINK)
    assert cost.prefill_s == pytest.approx(1.0)
    assert cost.transfer_head_s == pytest.approx(872 * 1000 / 1e8)
    assert cost.transfer_tail_s == pytest.approx(0.001 + 128 * 1000 / 1e8)
    assert cost.total_s == pytest.approx(1.0 + 0.00228)


def test_the_longest_of_prefill_slot_wait_and_transfer_counts() -> None:
    slow = LinkView(bandwidth_bytes_per_s=1e5, latency_s=0.0, queued_bytes=0)
    cost = pair_cost(NEED, prefill(), decode(), slow)
    assert cost.own_s == pytest.approx(8.72 + 1.28)


def test_what_the_prefill_worker_caches_saves_computation() -> None:
    need = Need(num_tokens=1000, num_output_tokens=100, num_cached_prefill=900)
    cost = pair_cost(need, prefill(), decode(), LINK)
    assert cost.prefill_s == pytest.approx(0.1)
    assert cost.transfer_head_s == pytest.approx(900 * 1000 / 1e8)


def test_what_the_decode_worker_caches_saves_bytes_but_no_computation() -> None:
    need = Need(num_tokens=1000, num_output_tokens=100, num_cached_decode=960)
    cost = pair_cost(need, prefill(), decode(), LINK)
    assert cost.prefill_s == pytest.approx(1.0)
    assert cost.transfer_head_s == 0.0
    assert cost.transfer_tail_s == pytest.approx(0.001 + 40 * 1000 / 1e8)


def test_the_queue_counts_reported_and_pending_tokens() -> None:
    busy = prefill(num_waiting_uncached_tokens=300, pending=Pending(num_tokens=200))
    assert pair_cost(NEED, busy, decode(), LINK).queue_s == pytest.approx(0.5)


def test_queued_and_pending_bytes_stand_before_ours_on_the_link() -> None:
    link = LinkView(bandwidth_bytes_per_s=1e6, latency_s=0.0, queued_bytes=500_000)
    loaded = decode(pending=Pending(num_bytes=250_000))
    idle_s = pair_cost(NEED, prefill(), decode(), link).transfer_head_s
    assert pair_cost(NEED, prefill(), loaded, link).transfer_head_s == pytest.approx(idle_s + 0.25)


def test_prefill_on_a_decode_worker_harms_each_of_its_streams() -> None:
    idle, busy = local_cost(NEED, decode()), local_cost(NEED, decode(num_running=3))
    assert idle.harm_s == 0.0
    assert busy.harm_s == pytest.approx(3 * 1.0 + 3 * 100 / 1000)
    assert pair_cost(NEED, prefill(), decode(num_running=3), LINK).harm_s == pytest.approx(0.3)


def test_a_free_slot_costs_no_wait_and_a_full_batch_does() -> None:
    assert slot_wait_s(NEED, decode(num_running=3)) == 0.0
    assert slot_wait_s(NEED, decode(num_running=4)) == pytest.approx(0.01 * 100 / 4)


def test_missing_blocks_cost_a_wait() -> None:
    full = decode(num_free_blocks=0, num_used_blocks=256)
    assert slot_wait_s(NEED, full) == pytest.approx(63 * 1.0 / 256)


def test_nothing_measured_is_no_division_by_zero() -> None:
    blank = {"prefill_tokens_per_s": 0.0, "step_s": 0.0}
    link = LinkView(bandwidth_bytes_per_s=0.0, latency_s=0.0, queued_bytes=0)
    assert pair_cost(NEED, prefill(**blank), decode(**blank), link).total_s > 0
    assert local_cost(NEED, decode(**blank)).total_s > 0


def test_the_terms_are_complete() -> None:
    cost = local_cost(NEED, decode(num_running=1))
    terms = cost.terms()
    assert terms["total_s"] == cost.total_s
    assert set(terms) == {
        "queue_s",
        "prefill_s",
        "slot_wait_s",
        "transfer_head_s",
        "transfer_tail_s",
        "harm_s",
        "total_s",
    }
