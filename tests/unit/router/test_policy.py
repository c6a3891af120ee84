import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import CheapestPicker, Hit, Policy, RouteRequest, list_choices
from router.worker_view import LinkView, Pending, WorkerView
from tests.unit.router.views import decode, prefill

REQUEST = RouteRequest(num_tokens=1000, num_output_tokens=100)


def policy(mode: str = "auto", seed: int = 1) -> Policy:
    return Policy(local_prefill=mode, picker=CheapestPicker(random.Random(seed)))


def names(choices: list) -> list[tuple[str, str]]:  # type: ignore[type-arg]
    return [(c.prefill.key.worker_id if c.prefill else "", c.decode.key.worker_id) for c in choices]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("auto", [("prefill-0", "decode-0"), ("", "decode-0")]),
        ("never", [("prefill-0", "decode-0")]),
        ("fallback", [("prefill-0", "decode-0")]),
    ],
)
def test_the_mode_says_which_choices_exist(mode: str, expected: list[tuple[str, str]]) -> None:
    assert names(list_choices([prefill()], [decode()], local_prefill=mode)) == expected


@pytest.mark.parametrize(("mode", "num_choices"), [("auto", 1), ("never", 0), ("fallback", 1)])
def test_unlinked_workers_are_no_pair(mode: str, num_choices: int) -> None:
    assert len(list_choices([prefill()], [decode(peers=0)], local_prefill=mode)) == num_choices


def test_a_link_to_an_earlier_incarnation_is_no_link() -> None:
    restarted = prefill()
    restarted = replace(restarted, key=restarted.key._replace(incarnation=2))
    assert not list_choices([restarted], [decode()], local_prefill="never")


def test_workers_that_may_not_be_routed_to_are_no_choice() -> None:
    gone = decode(is_routable=False)
    assert not list_choices([prefill()], [gone], local_prefill="auto")
    assert not list_choices([prefill(is_routable=False)], [decode()], local_prefill="never")


@pytest.mark.parametrize(
    "worker",
    [
        decode(num_running=4, num_waiting=4),
        decode(pending=Pending(num_requests=8)),
        decode(has_refused=True),
        decode(num_kv_blocks=10),
        decode(max_model_len=1000),
    ],
)
def test_full_and_too_small_workers_are_filtered(worker: WorkerView) -> None:
    assert policy().pick(REQUEST, [], [worker]) is None


def test_an_idle_cluster_prefills_where_it_decodes() -> None:
    decision = policy().pick(REQUEST, [prefill()], [decode()])
    assert decision is not None
    assert decision.chosen.choice.prefill is None
    assert decision.next_best is not None
    assert decision.next_best.choice.prefill is not None


def test_running_streams_send_the_prompt_to_the_prefill_worker() -> None:
    decision = policy().pick(REQUEST, [prefill()], [decode(num_running=2)])
    assert decision is not None
    assert decision.chosen.choice.prefill is not None


def test_a_dear_transfer_is_not_taken() -> None:
    slow = LinkView(bandwidth_bytes_per_s=1e5, latency_s=0.0, queued_bytes=0)
    worker = decode(num_running=2, links={prefill().key: slow})
    decision = policy().pick(REQUEST, [prefill()], [worker])
    assert decision is not None
    assert decision.chosen.choice.prefill is None


def test_the_worker_with_the_prefix_is_picked() -> None:
    workers = [prefill(n) for n in range(4)]
    hits = {workers[2].key: Hit(num_tokens=960, num_confirmed_tokens=960)}
    request = replace(REQUEST, hits=hits)
    decision = policy("never").pick(request, workers, [decode(peers=4)])
    assert decision is not None
    assert decision.chosen.choice.prefill == workers[2]
    assert decision.hit(workers[2]).num_tokens == 960


def test_excluded_workers_are_the_last_resort() -> None:
    workers = [prefill(n) for n in range(2)]
    request = replace(REQUEST, excluded=frozenset({workers[0].key}))
    decision = policy("never").pick(request, workers, [decode(peers=2)])
    assert decision is not None
    assert decision.chosen.choice.prefill == workers[1]
    alone = policy("never").pick(request, workers[:1], [decode()])
    assert alone is not None
    assert alone.chosen.choice.prefill == workers[0]


def test_fallback_goes_alone_when_the_only_prefill_worker_failed_this_request() -> None:
    request = replace(REQUEST, excluded=frozenset({prefill().key}))
    decision = policy("fallback").pick(request, [prefill()], [decode()])
    assert decision is not None
    assert decision.chosen.choice.prefill is None


def test_equal_costs_are_shared_out() -> None:
    workers = [decode(n, peers=0) for n in range(4)]
    rule = policy()
    picked = Counter()  # type: ignore[var-annotated]
    for _ in range(400):
        decision = rule.pick(REQUEST, [], workers)
        assert decision is not None
        picked[decision.chosen.choice.decode.key] += 1
    assert min(picked.values()) > 60
    assert len(picked) == 4


def test_a_burst_spreads_when_picks_are_counted() -> None:
    workers = {n: prefill(n) for n in range(4)}
    rule = policy("never")
    for _ in range(16):
        decision = rule.pick(REQUEST, list(workers.values()), [decode(peers=4, max_num_seqs=99)])
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


@given(
    running=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    waiting_tokens=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    seed=st.integers(0, 100),
)
def test_nothing_much_cheaper_is_ever_left(
    running: list[int], waiting_tokens: list[int], seed: int
) -> None:
    feeders = [prefill(n, num_waiting_uncached_tokens=t) for n, t in enumerate(waiting_tokens)]
    takers = [decode(n, peers=len(feeders), num_running=r) for n, r in enumerate(running)]
    decision = policy("auto", seed).pick(REQUEST, feeders, takers)
    assert decision is not None
    chosen_s = decision.chosen.cost.total_s
    if decision.next_best is not None:
        assert chosen_s <= decision.next_best.cost.total_s * 1.051 + 0.0002
    assert decision.num_choices == len(takers) * (len(feeders) + 1)
