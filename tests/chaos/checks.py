"""What must hold after a scenario."""

import asyncio
import time

from tests.chaos.cluster import QUIET_WITHIN_S, Footprint, owned
from tests.chaos.load import CANARY
from tests.chaos.scenario import STRUCK, Check, Stage
from tests.patience import naps

FOOTPRINT_WITHIN_S = 20.0
METRIC_WITHIN_S = 15.0  # they come with a worker's load, some seconds apart
SPARE_FDS = 4  # a keep-alive connection here, a file that is just read there
SPARE_THREADS = 8  # pools of threads fill up once and for all; the long form looks at slopes


# Always.


async def each_ends_once(stage: Stage) -> None:
    """Every request has exactly one terminal event, and nothing behind it."""
    assert stage.answers
    broken = [each for each in stage.all_answers if each.faults or not each.is_over]
    assert not broken, broken


async def nothing_is_lost(stage: Stage) -> None:
    """No request fails but those that the scenario dooms; refusals only under overload."""
    scenario = stage.scenario
    failed = [each for each in stage.all_answers if each.error]
    if scenario.may_refuse:
        failed = [each for each in failed if not each.is_refused]
    assert [each for each in failed if each.label not in scenario.may_fail] == []


async def answers_are_right(stage: Stage) -> None:
    """What was told to the end is what an undisturbed run tells."""
    for answer in stage.all_answers:
        if answer.is_complete:
            told, truth = answer.tells(), stage.truths.of(answer)
            assert told == truth, (answer.question, answer.label, told, truth)


async def the_canary_sang(stage: Stage) -> None:
    """The request beside all others had answers."""
    sung = [each for each in stage.answers if each.label == CANARY.label and each.is_complete]
    assert sung, "no canary was answered"


async def pools_are_quiet(stage: Stage) -> None:
    """Nothing runs or waits, no block has an owner, and every pool's sum is right."""
    for _ in naps(QUIET_WITHIN_S, 0.05):
        workers = await stage.cluster.workers()
        for kv in (worker["kv"] for worker in workers):
            assert sum(kv.values()) == 2 * kv["total"], kv
        if not any(sum(owned(worker)) for worker in workers):
            stage.quiet_after_s = time.monotonic() - stage.ended_at_s
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the pools are not quiet: {workers}")


async def processes_are_as_before(stage: Stage) -> None:
    """Whoever lived through it has the threads and files it had."""
    await stage.cluster.until_whole()
    end_s = time.monotonic() + FOOTPRINT_WITHIN_S
    while True:
        now = await stage.cluster.footprints()
        grown = {
            pid: (before, now[pid])
            for pid, before in stage.footprints.items()
            if pid in now and _has_grown(before, now[pid])
        }
        if not grown:
            return
        assert time.monotonic() < end_s, grown
        await asyncio.sleep(0.2)


def _has_grown(before: Footprint, now: Footprint) -> bool:
    more_fds = now.num_fds - before.num_fds
    return more_fds > SPARE_FDS or now.num_threads > before.num_threads + SPARE_THREADS


ALWAYS: tuple[Check, ...] = (
    each_ends_once,
    nothing_is_lost,
    answers_are_right,
    the_canary_sang,
    pools_are_quiet,
    processes_are_as_before,
)


# Where a scenario asks for it.


def stalls_below(limit_s: float) -> Check:
    """No stream that changed its worker stood still for as long as this."""

    async def check(stage: Stage) -> None:
        assert stage.affected, "no stream was hit"
        stalls_s = [answer.longest_stall_s for answer in stage.affected]
        assert max(stalls_s) < limit_s, sorted(stalls_s)

    return check


def recovered_within(limit_s: float) -> Check:
    """No stream that changed its worker stood still for as long as this around the blow."""

    async def check(stage: Stage) -> None:
        assert stage.affected, "no stream was hit"
        assert max(stage.recoveries_s) < limit_s, sorted(stage.recoveries_s)

    return check


async def some_were_hit(stage: Stage) -> None:
    """It was no blow into the air."""
    assert stage.affected


def only_these_failed(*labels: str) -> Check:
    """Each request with such a label ended with one error; the others did not."""

    async def check(stage: Stage) -> None:
        failed = {each.label for each in stage.all_answers if each.error}
        assert failed == set(labels)

    return check


def wrong_guesses_at_most(limit: int, *, label: str) -> Check:
    """So few answers found less in a cache than their routing was told."""

    async def check(stage: Stage) -> None:
        answers = [answer for answer in stage.extra if answer.label == label]
        told = [stage.first_routes[answer.request_id] for answer in answers]
        wrong = [
            (route["predicted_cached_tokens"], answer.num_cached_tokens)
            for route, answer in zip(told, answers, strict=True)
            if route["predicted_cached_tokens"] > answer.num_cached_tokens
        ]
        assert len(wrong) <= limit, wrong
        assert answers[-1].num_cached_tokens > 0, "the new cache is not known"

    return check


async def the_victims_were_replaced(stage: Stage) -> None:
    for victim in stage.victims:
        worker = await stage.cluster.worker(victim["id"])
        assert worker["incarnation"] > victim["incarnation"], worker


async def the_victims_live(stage: Stage) -> None:
    """Each came back as the same process."""
    for victim in stage.victims:
        worker = await stage.cluster.worker(victim["id"])
        assert (worker["pid"], worker["state"]) == (victim["pid"], "ready"), worker


def hits_at_most(limit: int) -> Check:
    """The point of the scenario's first fault was passed, but no more often than this."""

    async def check(stage: Stage) -> None:
        assert 0 < stage.cluster.num_hits(STRUCK) <= limit

    return check


def metric_grew(name: str) -> Check:
    """The system has noticed it."""

    async def check(stage: Stage) -> None:
        end_s = time.monotonic() + METRIC_WITHIN_S
        while await stage.cluster.metric(name) <= stage.metrics[name]:
            assert time.monotonic() < end_s, f"{name} stayed at {stage.metrics[name]}"
            await asyncio.sleep(0.1)

    return check
