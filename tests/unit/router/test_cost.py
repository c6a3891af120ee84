from typing import Any

import pytest

from router.cost import (
    AFFINITY_SHARE,
    Cost,
    Need,
    decode_part,
    local_cost,
)
from router.cost import pair_cost as full_pair_cost
from router.worker_view import LinkView, Pending, WorkerView
from tests.unit.router.views import LINK, TOKEN_S, decode, prefill

NEED = Need(num_tokens=1000, num_output_tokens=100)
PREFILL_S = 0.01 + 1000 * TOKEN_S


def pair(taker: WorkerView | None = None, feeder: WorkerView | None = None, **facts: Any) -> Cost:
    taker = taker or decode()
    part = decode_part(NEED, taker, num_cached=facts.get("num_cached_decode", 0))
    feeder = feeder or prefill()
    return full_pair_cost(NEED, feeder, taker, taker.links[feeder.key], part, **facts)


def local(taker: WorkerView, **facts: Any) -> Cost:
    part = decode_part(NEED, taker, num_cached=facts.get("num_cached_decode", 0))
    return local_cost(NEED, taker, part, **facts)


def linked(**facts: Any) -> WorkerView:
    link = LinkView(**{"bandwidth_bytes_per_s": 1e8, "latency_s": 0.0, "queued_bytes": 0, **facts})
    return decode(links={prefill().key: link})


def test_a_pair_costs_prefill_and_the_transfer_of_the_last_chunk() -> None:
    cost = pair()
    assert cost.prefill_s == pytest.approx(PREFILL_S)
    assert cost.transfer_head_s == pytest.approx(872 * 1000 / 1e8)
    assert cost.transfer_tail_s == pytest.approx(0.001 + 128 * 1000 / 1e8)
    assert cost.total_s == pytest.approx(PREFILL_S + 0.00228)


def test_a_step_has_a_fixed_cost_whatever_is_in_it() -> None:
    slow, quick = prefill(step_s=0.2), prefill(step_s=0.001)
    tiny = Need(num_tokens=1, num_output_tokens=1)
    part = decode_part(tiny, decode(), num_cached=0)
    costs = [full_pair_cost(tiny, each, decode(), LINK, part).prefill_s for each in (slow, quick)]
    assert costs[0] - costs[1] == pytest.approx(0.199, rel=0.02)


def test_the_longest_of_prefill_slot_wait_and_transfer_counts() -> None:
    assert pair(linked(bandwidth_bytes_per_s=1e5)).own_s == pytest.approx(8.72 + 1.28)


def test_what_the_prefill_worker_caches_saves_computation() -> None:
    cost = pair(num_cached_prefill=900)
    assert cost.prefill_s == pytest.approx(0.01 + 100 * TOKEN_S)
    assert cost.transfer_head_s == pytest.approx(900 * 1000 / 1e8)


def test_what_the_decode_worker_caches_saves_bytes_but_no_computation() -> None:
    cost = pair(num_cached_decode=960)
    assert cost.prefill_s == pytest.approx(PREFILL_S)
    assert cost.transfer_head_s == 0.0
    assert cost.transfer_tail_s == pytest.approx(0.001 + 40 * 1000 / 1e8)


def test_the_queue_counts_reported_and_pending_tokens() -> None:
    busy = prefill(num_waiting_uncached_tokens=300, pending=Pending(num_tokens=200))
    assert pair(feeder=busy).queue_s == pytest.approx(500 * TOKEN_S)


def test_queued_and_pending_bytes_stand_before_ours_on_the_link() -> None:
    idle_s = pair(linked(bandwidth_bytes_per_s=1e6)).transfer_head_s
    queued = LinkView(bandwidth_bytes_per_s=1e6, latency_s=0.0, queued_bytes=500_000)
    loaded = decode(links={prefill().key: queued}, pending=Pending(num_bytes=250_000))
    assert pair(loaded).transfer_head_s == pytest.approx(idle_s + 0.75)


def test_prefill_on_a_decode_worker_harms_each_of_its_streams() -> None:
    idle, busy = local(decode()), local(decode(num_running=3))
    assert idle.harm_s == 0.0
    # Their steps come anyway: a prompt token adds its own 1 ms to each, and so does each row.
    assert busy.harm_s == pytest.approx(3 * 1000 * 0.001 + 3 * 100 * 0.001)
    assert pair(decode(num_running=3)).harm_s == pytest.approx(3 * 100 * 0.001)


def test_harm_follows_what_the_worker_learnt_of_its_steps() -> None:
    known = decode(num_running=3, request_s=0.002, kv_token_s=1e-6)
    assert pair(known).harm_s == pytest.approx(3 * 100 * (0.002 + 1050 * 1e-6))


def test_company_on_the_decode_worker_makes_our_own_steps_longer() -> None:
    known = {"request_s": 0.002, "kv_token_s": 1e-6, "num_used_blocks": 20}
    assert pair(decode()).decode_s == 0.0
    lonely, crowded = decode(**known), decode(num_running=3, **known)
    assert pair(lonely).decode_s == pytest.approx(100 * 320 * 1e-6)
    assert pair(crowded).decode_s == pytest.approx(100 * (3 * 0.002 + 320 * 1e-6))
    promised = decode(num_promised_tokens=500, pending=Pending(num_kv_tokens=80), **known)
    assert local(promised).decode_s == pytest.approx(100 * (320 + 580) * 1e-6)


def test_who_was_promised_room_takes_it_first() -> None:
    full = {"num_free_blocks": 64, "num_used_blocks": 192}
    assert pair(decode(**full)).slot_wait_s == 0.0
    promised = decode(num_promised_tokens=1000, pending=Pending(num_kv_tokens=600), **full)
    # 1001 tokens of ours and 1600 before them need 163 blocks.
    assert pair(promised).slot_wait_s == pytest.approx((163 - 64) * 1.0 / 192)


def test_a_prompt_harms_those_that_wait_for_room_too() -> None:
    waiting = decode(num_running=1, num_transferring=2)
    assert local(waiting).harm_s == pytest.approx(3 * 1000 * 0.001 + 3 * 100 * 0.001)


def test_what_is_computed_keeps_those_waiting_that_come_behind() -> None:
    crowded = NEED._replace(num_kept_waiting=2.0)
    part = decode_part(crowded, decode(), num_cached=0)
    costs = [
        full_pair_cost(crowded, prefill(), decode(), LINK, part, num_cached_prefill=cached)
        for cached in (0, 500)
    ]
    assert costs[0].harm_s == pytest.approx(2.0 * PREFILL_S)
    # A cached half is worth its time to ourselves, and to two others.
    assert costs[0].total_s - costs[1].total_s == pytest.approx(3 * 500 * TOKEN_S, rel=0.01)


def test_a_free_slot_costs_no_wait_and_a_full_batch_does() -> None:
    assert pair(decode(num_running=3)).slot_wait_s == 0.0
    assert pair(decode(num_running=4)).slot_wait_s == pytest.approx(0.01 * 100 / 4)


def test_missing_blocks_cost_a_wait() -> None:
    full = decode(num_free_blocks=0, num_used_blocks=256)
    assert pair(full).slot_wait_s == pytest.approx(63 * 1.0 / 256)


def test_leaving_the_sessions_workers_costs_a_share_of_the_computation() -> None:
    assert pair().affinity_s == 0.0
    half, whole = pair(num_strangers=1), pair(num_strangers=2)
    assert whole.affinity_s == pytest.approx(AFFINITY_SHARE * PREFILL_S)
    assert half.affinity_s == pytest.approx(whole.affinity_s / 2)
    assert local(decode(), num_strangers=1).affinity_s == pytest.approx(whole.affinity_s)


def test_nothing_measured_is_no_division_by_zero() -> None:
    blank = {"prefill_tokens_per_s": 0.0, "step_s": 0.0}
    link = LinkView(bandwidth_bytes_per_s=0.0, latency_s=0.0, queued_bytes=0)
    taker = decode(links={prefill().key: link}, **blank)
    assert pair(taker, prefill(**blank)).total_s > 0
    assert local(taker).total_s > 0


def test_the_terms_are_complete() -> None:
    cost = pair(decode(num_running=1), num_strangers=1)
    terms = cost.terms()
    assert terms["total_s"] == cost.total_s
    assert set(terms) == {
        "queue_s",
        "prefill_s",
        "slot_wait_s",
        "transfer_head_s",
        "transfer_tail_s",
        "decode_s",
        "affinity_s",
        "harm_s",
        "total_s",
    }
    assert LINK.latency_s < terms["transfer_tail_s"]
