import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cost import decode_part, local_cost, pair_cost
from router.joint_scorer import JointCostScorer
from router.policy import CheapestPicker, Decision, FilteredPolicy, RouteRequest, has_choice
from router.worker_view import LinkView, Pending, WorkerView
from tests.unit.router.views import cached, decode, pools, prefill

REQUEST = RouteRequest(num_tokens=1000, num_output_tokens=100)


def policy(mode: str = "auto", seed: int = 1) -> FilteredPolicy:
    rng = random.Random(seed)
    return FilteredPolicy(local_prefill=mode, scorer=JointCostScorer(), picker=CheapestPicker(rng))


def pick(
    feeders: Sequence[WorkerView],
    takers: Sequence[WorkerView],
    mode: str = "auto",
    request: RouteRequest = REQUEST,
) -> Decision | None:
    return policy(mode).pick(request, pools(feeders, takers))


def pairs_of(decision: Decision | None) -> set[tuple[str, str]]:
    if decision is None:
        return set()
    scored = [each for each in (decision.chosen, decision.next_best) if each is not None]
    return {
        (each.choice.prefill.key.worker_id if each.choice.prefill else "",
         each.choice.decode.key.worker_id)
        for each in scored
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("auto", {("prefill-0", "decode-0"), ("", "decode-0")}),
        ("never", {("prefill-0", "decode-0")}),
        ("fallback", {("prefill-0", "decode-0")}),
    ],
)
def test_the_mode_says_which_choices_exist(mode: str, expected: set[tuple[str, str]]) -> None:
    assert pairs_of(pick([prefill()], [decode()], mode)) == expected


@pytest.mark.parametrize(
    ("mode", "expected"), [("auto", True), ("never", False), ("fallback", True)]
)
def test_unlinked_workers_are_no_pair(mode: str, expected: bool) -> None:
    alone = [decode(peers=0)]
    assert (pick([prefill()], alone, mode) is not None) is expected
    assert has_choice(pools([prefill()], alone), local_prefill=mode) is expected


def test_a_link_to_an_earlier_incarnation_is_no_link() -> None:
    restarted = prefill()
    restarted = replace(restarted, key=restarted.key._replace(incarnation=2))
    assert pick([restarted], [decode()], "never") is None
    assert not has_choice(pools([restarted], [decode()]), local_prefill="never")


def test_workers_that_may_not_be_routed_to_are_no_choice() -> None:
    gone = decode(is_routable=False)
    assert pick([prefill()], [gone]) is None
    assert not has_choice(pools([prefill()], [gone]), local_prefill="auto")
    assert pick([prefill(is_routable=False)], [decode()], "never") is None


def test_being_busy_is_no_lack_of_choice() -> None:
    full = decode(has_refused=True)
    assert pick([prefill()], [full]) is None
    assert has_choice(pools([prefill()], [full]), local_prefill="never")


@pytest.mark.parametrize(
    "worker",
    [
        decode(num_running=4, num_waiting=4),
        decode(pending=Pending(num_requests=8)),
        decode(num_used_blocks=256, num_promised_tokens=4096),
        decode(num_used_blocks=256, pending=Pending(num_kv_tokens=4096)),
        decode(num_waiting_uncached_tokens=2 * 4096),
        decode(has_refused=True),
        decode(num_kv_blocks=10),
        decode(max_model_len=1000),
    ],
)
def test_full_and_too_small_workers_are_filtered(worker: WorkerView) -> None:
    assert pick([], [worker]) is None


def test_prompts_that_wait_on_a_prefill_worker_fill_no_kv() -> None:
    assert pick([prefill(num_waiting_uncached_tokens=60_000)], [decode()], "never") is not None


def test_while_prompts_wait_a_cached_prefix_is_worth_a_longer_queue() -> None:
    request = replace(REQUEST, cached_prefill=cached(_0=600))
    holder = prefill(0, num_waiting=1, num_waiting_uncached_tokens=1100)
    alone = pick([holder, prefill(1)], [decode(peers=2)], "never", request)
    assert alone is not None
    assert alone.chosen.choice.prefill == prefill(1)
    crowd = [prefill(n, num_waiting=2, num_waiting_uncached_tokens=2000) for n in range(2, 4)]
    busy = pick([holder, prefill(1), *crowd], [decode(peers=4)], "never", request)
    assert busy is not None
    assert busy.chosen.choice.prefill == holder


def test_an_idle_cluster_prefills_where_it_decodes() -> None:
    decision = pick([prefill()], [decode()])
    assert decision is not None
    assert decision.chosen.choice.prefill is None
    assert decision.next_best is not None
    assert decision.next_best.choice.prefill is not None


def test_running_streams_send_the_prompt_to_the_prefill_worker() -> None:
    decision = pick([prefill()], [decode(num_running=2)])
    assert decision is not None
    assert decision.chosen.choice.prefill is not None


def test_a_dear_transfer_is_not_taken() -> None:
    slow = LinkView(bandwidth_bytes_per_s=1e5, latency_s=0.0, queued_bytes=0)
    worker = decode(num_running=2, links={prefill().key: slow})
    decision = pick([prefill()], [worker])
    assert decision is not None
    assert decision.chosen.choice.prefill is None


def test_the_worker_with_the_prefix_is_picked() -> None:
    workers = [prefill(n) for n in range(4)]
    request = replace(REQUEST, cached_prefill=cached(_2=960))
    decision = pick(workers, [decode(peers=4)], "never", request)
    assert decision is not None
    assert decision.chosen.choice.prefill == workers[2]


def test_excluded_workers_are_the_last_resort() -> None:
    workers = [prefill(n) for n in range(2)]
    request = replace(REQUEST, excluded=frozenset({workers[0].key}))
    decision = pick(workers, [decode(peers=2)], "never", request)
    assert decision is not None
    assert decision.chosen.choice.prefill == workers[1]
    alone = pick(workers[:1], [decode()], "never", request)
    assert alone is not None
    assert alone.chosen.choice.prefill == workers[0]


def test_fallback_goes_alone_when_the_only_prefill_worker_failed_this_request() -> None:
    request = replace(REQUEST, excluded=frozenset({prefill().key}))
    decision = pick([prefill()], [decode()], "fallback", request)
    assert decision is not None
    assert decision.chosen.choice.prefill is None


def test_equal_costs_are_shared_out() -> None:
    workers = [decode(n, peers=0) for n in range(4)]
    rule = policy()
    picked = Counter()  # type: ignore[var-annotated]
    for _ in range(400):
        decision = rule.pick(REQUEST, pools([], workers))
        assert decision is not None
        picked[decision.chosen.choice.decode.key] += 1
    assert min(picked.values()) > 60
    assert len(picked) == 4


def test_a_burst_spreads_when_picks_are_counted() -> None:
    workers = {n: prefill(n) for n in range(4)}
    rule = policy("never")
    for _ in range(16):
        decision = rule.pick(
            REQUEST, pools(list(workers.values()), [decode(peers=4, max_num_seqs=99)])
        )
        assert decision is not None
        chosen = decision.chosen.choice.prefill
        assert chosen is not None
        number = int(chosen.key.worker_id.split("-")[1])
        pending = Pending(
            num_requests=chosen.pending.num_requests + 1,
            num_tokens=chosen.pending.num_tokens + 1000,
        )
        workers[number] = replace(chosen, pending=pending)
    assert [worker.pending.num_requests for worker in workers.values()] == [4] * 4


def test_the_sessions_workers_win_among_equals_and_not_over_a_queue() -> None:
    takers = [decode(n, peers=4) for n in range(4)]
    feeders = [prefill(n) for n in range(4)]
    session = frozenset({feeders[3].key, takers[2].key})
    request = replace(REQUEST, session_workers=session)
    for seed in range(10):
        decision = policy("never", seed).pick(request, pools(feeders, takers))
        assert decision is not None
        assert {worker.key for worker in decision.chosen.choice.workers} == session
    feeders[3] = prefill(3, num_waiting_uncached_tokens=1000)
    decision = pick(feeders, takers, "never", request)
    assert decision is not None
    assert decision.chosen.choice.prefill != feeders[3]


def every_cost(feeders: Sequence[WorkerView], takers: Sequence[WorkerView]) -> list[float]:
    parts = [decode_part(REQUEST.need(), taker, num_cached=0) for taker in takers]
    entries = list(zip(takers, parts, strict=True))
    costs = [local_cost(REQUEST.need(), taker, part) for taker, part in entries]
    costs += [
        pair_cost(REQUEST.need(), feeder, taker, taker.links[feeder.key], part)
        for taker, part in entries
        for feeder in feeders
        if feeder.key in taker.links
    ]
    return [cost.total_s for cost in costs]


@given(
    running=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    waiting_tokens=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    bandwidths=st.lists(st.sampled_from([1e5, 1e6, 1e8]), min_size=1, max_size=6),
    seed=st.integers(0, 100),
)
def test_nothing_much_cheaper_is_ever_left(
    running: list[int], waiting_tokens: list[int], bandwidths: list[float], seed: int
) -> None:
    feeders = [prefill(n, num_waiting_uncached_tokens=t) for n, t in enumerate(waiting_tokens)]
    links = {
        feeder.key: LinkView(
            bandwidth_bytes_per_s=bandwidths[n % len(bandwidths)], latency_s=0.0, queued_bytes=0
        )
        for n, feeder in enumerate(feeders)
    }
    takers = [decode(n, links=links, num_running=r) for n, r in enumerate(running)]
    decision = policy("auto", seed).pick(REQUEST, pools(feeders, takers))
    assert decision is not None
    best_s = min(every_cost(feeders, takers))
    assert decision.chosen.cost.total_s <= best_s * 1.05 + 0.0001 + 1e-9


def test_of_many_workers_every_pair_is_a_choice() -> None:
    feeders = [prefill(n, num_waiting_uncached_tokens=10 * n) for n in range(100)]
    takers = [decode(n, peers=100, num_running=n % 4) for n in range(100)]
    decision = pick(feeders, takers)
    assert decision is not None
    assert decision.num_choices == 100 * 100 + 100
    assert decision.chosen.cost.total_s <= min(every_cost(feeders, takers)) * 1.05 + 0.0002
