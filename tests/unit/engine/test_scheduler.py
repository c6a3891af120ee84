"""The scheduler's two verbs, without a model."""

from engine.block_hash import BlockHash
from engine.block_pool import BlockPool
from engine.request import Request, RequestStatus
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from tests.unit.engine.conftest import make_request

BLOCK_SIZE = 4


def make_scheduler(*, num_blocks: int = 32, max_num_seqs: int = 8) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        hash_root=BlockHash(b"root"),
    )


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def add(scheduler: Scheduler, name: str, length: int, first: int = 0, **changes: int) -> Request:
    request = make_request(name, prompt(length, first), **changes)
    scheduler.add(request)
    return request


def apply(scheduler: Scheduler, schedule: Schedule) -> None:
    for entry in schedule.scheduled:
        samples = entry.samples
        scheduler.update(entry)
        if samples:
            entry.request.token_ids.append(99)


def step(scheduler: Scheduler, budget: int = 64) -> dict[str, int]:
    schedule = scheduler.schedule(budget)
    apply(scheduler, schedule)
    return {entry.request.request_id: entry.num_tokens for entry in schedule.scheduled}


def test_a_long_prompt_runs_in_chunks_that_fill_the_budget():
    scheduler = make_scheduler()
    add(scheduler, "a", 20)
    assert [step(scheduler, 8) for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}]


def test_new_blocks_are_wiped_unless_the_step_fills_them():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 19)
    schedule = scheduler.schedule(10)
    assert schedule.new_block_ids == request.block_ids
    assert schedule.block_ids_to_wipe(BLOCK_SIZE) == request.block_ids[2:]
    apply(scheduler, schedule)
    assert scheduler.schedule(10).block_ids_to_wipe(BLOCK_SIZE) == []


def test_decodes_come_first_and_chunks_get_the_rest():
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "b", 20, 100)
    add(scheduler, "c", 4, 200)
    schedule = scheduler.schedule(8)
    assert [(e.request.request_id, e.num_tokens) for e in schedule.scheduled] == [
        ("a", 1),
        ("b", 7),
    ]
    apply(scheduler, schedule)
    assert step(scheduler, 16) == {"a": 1, "b": 13, "c": 2}


def test_chunks_have_their_own_limit():
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "b", 20, 100)
    schedule = scheduler.schedule(64, max_chunk_tokens=3)
    assert [entry.num_tokens for entry in schedule.scheduled] == [1, 3]


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [add(scheduler, name, 3, 10 * n) for n, name in enumerate("abc")]
    assert set(step(scheduler)) == {"a", "b"}
    scheduler.remove(requests[0])
    assert set(step(scheduler)) == {"b", "c"}


def test_an_unscheduled_row_does_not_sample():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 20)
    schedule = scheduler.schedule(8)
    assert not schedule.scheduled[0].samples
    apply(scheduler, schedule)
    assert request.num_tokens == 20


def test_a_shared_prefix_is_computed_once():
    scheduler = make_scheduler()
    add(scheduler, "a", 10)
    step(scheduler)
    second = make_request("b", [*prompt(8), 50, 51])
    scheduler.add(second)
    assert step(scheduler) == {"a": 1, "b": 2}
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == scheduler.queues.running[0].block_ids[:2]


def test_a_block_that_is_not_yet_computed_is_not_shared():
    scheduler = make_scheduler()
    add(scheduler, "a", 16)
    scheduler.schedule(4)  # not applied: nothing is computed
    second = add(scheduler, "b", 16)
    scheduler.schedule(64)
    assert second.num_cached_tokens == 0


def test_a_fully_cached_prompt_still_computes_its_last_block():
    scheduler = make_scheduler()
    add(scheduler, "a", 8)
    step(scheduler)
    second = add(scheduler, "b", 8)
    assert step(scheduler) == {"a": 1, "b": 4}
    assert second.num_cached_tokens == 4


def test_another_salt_shares_nothing():
    scheduler = make_scheduler()
    add(scheduler, "a", 8)
    step(scheduler)
    second = make_request("b", prompt(8), cache_salt="s")
    scheduler.add(second)
    step(scheduler)
    assert second.num_cached_tokens == 0


def test_the_latest_arrival_is_preempted_for_an_earlier_one():
    scheduler = make_scheduler(num_blocks=4)
    first = add(scheduler, "a", 7)
    step(scheduler)
    second = add(scheduler, "b", 2, 100)
    step(scheduler)
    assert second.status is RequestStatus.RUNNING
    while not scheduler.num_preemptions:
        assert step(scheduler)
    assert second.status is RequestStatus.PREEMPTED
    assert second.block_ids == []
    assert first.status is RequestStatus.RUNNING
    assert second.num_cached_tokens == 0
    scheduler.check_integrity([first, second])


def test_a_preempted_request_runs_again_before_later_ones():
    scheduler = make_scheduler(num_blocks=4)
    first = add(scheduler, "a", 7)
    step(scheduler)
    second = add(scheduler, "b", 2, 100)
    third = add(scheduler, "c", 2, 200)
    while not scheduler.num_preemptions:
        step(scheduler)
    scheduler.remove(first)
    step(scheduler)
    assert scheduler.queues.running[0] is second
    scheduler.check_integrity([second, third])


def test_a_hand_over_is_never_preempted():
    scheduler = make_scheduler(num_blocks=4)
    first = add(scheduler, "a", 7)
    step(scheduler)
    second = add(scheduler, "b", 4, 100, hand_over=True)
    for _ in range(12):
        schedule = scheduler.schedule(3)
        apply(scheduler, schedule)
        if second.num_tokens == 5 and second in scheduler.queues.running:
            scheduler.hold(second)
    assert second.num_preemptions == 0
    assert first.status is RequestStatus.PREEMPTED  # it waits for the hand-over's blocks
    scheduler.remove(second)
    assert step(scheduler) != {}


def test_held_blocks_stay_until_released_and_can_be_shared():
    scheduler = make_scheduler(num_blocks=8)
    request = add(scheduler, "a", 8, hand_over=True)
    step(scheduler)
    scheduler.hold(request)
    pool = scheduler._pool
    assert pool.counts().held == 2
    second = add(scheduler, "b", 9)
    step(scheduler)
    assert second.num_cached_tokens == 8
    assert (pool.counts().held, pool.counts().used) == (0, 3)
    scheduler.remove(second)
    assert pool.counts().held == 2
    scheduler.remove(request)
    assert pool.counts().held == 0
    scheduler.check_integrity([])


def test_a_reservation_takes_cached_blocks_first_and_may_take_all():
    scheduler = make_scheduler()
    add(scheduler, "a", 8)
    step(scheduler)
    request = make_request("b", prompt(8))
    new_block_ids = scheduler.reserve(request)
    assert new_block_ids is not None
    assert len(new_block_ids) == 1  # room for the token to come
    assert request.num_cached_tokens == 8


def test_a_reservation_without_room_changes_nothing():
    scheduler = make_scheduler(num_blocks=3)
    add(scheduler, "a", 8)
    step(scheduler)
    before = scheduler._pool.counts()
    assert scheduler.reserve(make_request("b", prompt(5, 50))) is None
    assert scheduler._pool.counts() == before


def test_a_starved_prompt_comes_before_a_reservation():
    scheduler = make_scheduler(num_blocks=4)
    running = add(scheduler, "a", 8)
    step(scheduler)
    add(scheduler, "b", 12, 50)
    step(scheduler)
    assert scheduler.reserve(make_request("c", prompt(1, 90))) is None
    scheduler.remove(running)
    assert step(scheduler) == {"b": 12}


def test_an_activated_request_waits_for_a_place_and_keeps_its_blocks():
    scheduler = make_scheduler(max_num_seqs=1)
    running = add(scheduler, "a", 4)
    step(scheduler)
    request = make_request("b", prompt(4, 50))
    assert scheduler.reserve(request) is not None
    scheduler.activate(request)
    request.token_ids.append(7)
    assert step(scheduler) == {"a": 1}
    scheduler.remove(running)
    assert step(scheduler) == {"b": 1}
    assert request.token_ids[4:] == [7, 99]


def test_what_arrived_twice_is_kept_once():
    scheduler = make_scheduler()
    requests = [make_request(name, [*prompt(9), last]) for name, last in (("a", 7), ("b", 8))]
    for request in requests:
        assert scheduler.reserve(request) is not None
    for request in requests:
        scheduler.activate(request)
        request.token_ids.append(7)
    one, other = (request.block_ids for request in requests)
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
    assert scheduler._pool.counts().used == 4
    assert step(scheduler) == {"a": 1, "b": 1}
    for request in requests:
        scheduler.remove(request)
    assert scheduler._pool.counts().cached == 2
    scheduler.check_integrity([])


def test_uncached_tokens_count_what_nobody_has_computed():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a", 8)
    step(scheduler)
    add(scheduler, "b", 10)
    assert scheduler.num_uncached_tokens() == 2
    add(scheduler, "c", 10, 100)
    assert scheduler.num_uncached_tokens() == 12


def test_a_preempted_request_does_not_come_back_in_the_same_step():
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, "a", 8)
    add(scheduler, "b", 8, 100)
    step(scheduler)
    add(scheduler, "c", 1, 200)
    while not scheduler.num_preemptions:
        ran = step(scheduler)
    assert set(ran) == {"a"}


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one():
    scheduler = make_scheduler(num_blocks=64)
    add(scheduler, "long", 100)
    step(scheduler, 16)
    add(scheduler, "short", 6, 200)
    assert step(scheduler, 16) == {"long": 10, "short": 6}
    assert step(scheduler, 16) == {"short": 1, "long": 15}


def test_short_prompts_take_at_most_half_of_a_long_ones_speed():
    scheduler = make_scheduler(num_blocks=64)
    add(scheduler, "long", 60)
    step(scheduler, 16)
    for number in range(6):
        add(scheduler, f"short-{number}", 4, 200 + 10 * number)
    assert step(scheduler, 16) == {"long": 8, "short-0": 4, "short-1": 4}


def test_what_short_prompts_leave_of_their_half_is_not_lost():
    scheduler = make_scheduler(num_blocks=64)
    add(scheduler, "long", 60)
    add(scheduler, "longer", 61, 100)
    add(scheduler, "short", 3, 200)
    assert step(scheduler, 16) == {"long": 16}, "one that is behind a long one waits with it"


def test_running_requests_get_a_token_in_every_step_of_a_long_prompt():
    scheduler = make_scheduler(num_blocks=600, max_num_seqs=8)
    decodes = [add(scheduler, f"d{number}", 5, 100 * number) for number in range(4)]
    step(scheduler)
    add(scheduler, "long", 2000, 1000)
    steps = [step(scheduler, 64) for _ in range(34)]
    assert all(ran[request.request_id] == 1 for ran in steps for request in decodes)
    assert [ran["long"] for ran in steps] == 33 * [60] + [20]


# Priorities


def test_the_better_priority_runs_first_and_equals_in_order_of_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    requests = {
        name: add(scheduler, name, 3, 10 * number, priority=priority)
        for number, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 1), ("d", -1)])
    }
    order = []
    while requests:
        (name,) = step(scheduler)
        scheduler.remove(requests.pop(name))
        order.append(name)
    assert order == ["d", "b", "a", "c"]


def test_a_better_priority_takes_the_place_of_the_worst_that_runs():
    scheduler = make_scheduler(max_num_seqs=2)
    first = add(scheduler, "first", 3, 0, priority=1)
    second = add(scheduler, "second", 3, 10, priority=1)
    step(scheduler)
    urgent = add(scheduler, "urgent", 3, 20, priority=0)
    assert step(scheduler) == {"first": 1, "urgent": 3}
    assert second.status is RequestStatus.PREEMPTED
    assert scheduler.num_preemptions == 1
    scheduler.check_integrity([first, second, urgent])


def test_an_equal_priority_takes_nothing():
    scheduler = make_scheduler(max_num_seqs=2, num_blocks=4)
    add(scheduler, "a", 3, 0)
    add(scheduler, "b", 3, 10)
    step(scheduler)
    add(scheduler, "c", 3, 20)
    assert set(step(scheduler)) == {"a", "b"}
    assert scheduler.num_preemptions == 0


def test_a_better_priority_takes_the_blocks_it_needs_and_no_more():
    scheduler = make_scheduler(num_blocks=12)
    requests = [add(scheduler, f"low-{n}", 7, 10 * n, priority=5) for n in range(3)]
    step(scheduler)
    requests.append(add(scheduler, "urgent", 15, 100))
    assert step(scheduler) == {"low-0": 1, "low-1": 1, "urgent": 15}
    assert [request.num_preemptions for request in requests] == [0, 0, 1, 0]
    scheduler.check_integrity(requests)


def test_nobody_makes_way_for_one_that_would_still_not_fit():
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, "high", 12, priority=0)
    add(scheduler, "low", 3, 100, priority=5)
    step(scheduler)
    add(scheduler, "urgent", 20, 200, priority=1)
    assert step(scheduler) == {"high": 1, "low": 1}
    assert scheduler.num_preemptions == 0


def test_the_worst_priority_is_preempted_for_a_next_token_however_early_it_came():
    scheduler = make_scheduler(num_blocks=4)
    low = add(scheduler, "low", 2, 100, priority=1)
    step(scheduler)
    high = add(scheduler, "high", 7)
    while not scheduler.num_preemptions:
        assert "high" in step(scheduler)
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_a_prompt_of_a_better_priority_is_computed_before_one_half_done():
    scheduler = make_scheduler(num_blocks=64)
    add(scheduler, "low", 60, priority=1)
    step(scheduler, 16)
    add(scheduler, "high", 30, 100)
    assert step(scheduler, 16) == {"high": 16}
    assert step(scheduler, 16) == {"high": 14, "low": 2}


def test_a_short_prompt_of_a_worse_priority_takes_no_share_of_a_long_one():
    scheduler = make_scheduler(num_blocks=64)
    add(scheduler, "long", 60)
    add(scheduler, "short", 3, 100, priority=1)
    assert step(scheduler, 16) == {"long": 16}


def test_a_reservation_of_a_better_priority_takes_blocks_of_a_worse_one():
    scheduler = make_scheduler(num_blocks=8)
    low = add(scheduler, "low", 15, priority=1)
    step(scheduler)
    urgent = make_request("urgent", prompt(15, 100))
    assert scheduler.reserve(urgent) is not None
    assert low.status is RequestStatus.PREEMPTED
    equal = make_request("equal", prompt(19, 200))
    assert scheduler.reserve(equal) is None
    scheduler.check_integrity([low, urgent])


def test_an_activated_request_that_came_later_is_preempted_before_one_that_runs():
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=1)
    first = add(scheduler, "first", 8)
    step(scheduler)
    later = make_request("later", prompt(8, 100))
    assert scheduler.reserve(later) is not None
    scheduler.activate(later)
    later.token_ids.append(7)
    for _ in range(10):
        assert step(scheduler) == {"first": 1}
    assert (first.num_preemptions, later.num_preemptions) == (0, 1)
    assert later.token_ids[8:] == [7], "the peer's token is kept and computed again"
    scheduler.check_integrity([first, later])


def test_prompts_do_not_overtake_a_reservation_that_waits_for_blocks():
    scheduler = make_scheduler(num_blocks=10)
    running = add(scheduler, "running", 16)
    step(scheduler)
    big = make_request("big", prompt(20, 100))
    assert scheduler.reserve(big) is None
    small = add(scheduler, "small", 3, 200)
    assert set(step(scheduler)) == {"running"}
    assert scheduler.reserve(big) is None
    scheduler.remove(running)
    assert scheduler.reserve(big) is not None
    assert step(scheduler) == {"small": 3}
    # It asks no more, so nobody waits for it any longer.
    other = make_request("other", prompt(12, 300))
    assert scheduler.reserve(other) is None
    step(scheduler)
    add(scheduler, "tiny", 1, 400)
    assert set(step(scheduler)) == {"small", "tiny"}
    assert small.num_preemptions == 0
