"""Who may start on a worker, and how its streams end in a drain."""

import asyncio

import pytest

from rpc.admission import Admission
from rpc.errors import (
    AdmissionRefusedError,
    DrainingError,
    StaleWorkerError,
    WorkerUnavailableError,
)
from tests.fake_time import in_fake_time


def make_admission(*, max_waiting: int = 2) -> Admission:
    admission = Admission(
        incarnation=7,
        max_waiting=max_waiting,
        retry_after_s=lambda: 0.5,
        now=asyncio.get_running_loop().time,
    )
    admission.open()
    return admission


def admit(admission: Admission, request_id: str = "a", *, incarnation: int = 7):
    return admission.admit(request_id, incarnation=incarnation)


@in_fake_time
async def test_a_leg_counts_as_waiting_until_it_is_scheduled() -> None:
    admission = make_admission()
    with admit(admission) as leg:
        assert (admission.num_legs, admission.num_waiting) == (1, 1)
        leg.is_waiting = False
        assert (admission.num_legs, admission.num_waiting) == (1, 0)
    assert admission.num_legs == 0


@in_fake_time
async def test_a_full_worker_refuses_and_says_when_to_come_back() -> None:
    admission = make_admission(max_waiting=1)
    with admit(admission) as leg:
        with pytest.raises(AdmissionRefusedError) as refusal, admit(admission, "b"):
            pass
        assert refusal.value.retry_after_s == 0.5
        leg.is_waiting = False
        with admit(admission, "b"):
            assert admission.num_legs == 2


@in_fake_time
async def test_a_request_for_another_process_is_stale() -> None:
    with pytest.raises(StaleWorkerError), admit(make_admission(), incarnation=6):
        pass


@in_fake_time
async def test_nothing_is_admitted_before_the_start_is_over() -> None:
    admission = Admission(incarnation=7, max_waiting=1, retry_after_s=lambda: 0.5)
    with pytest.raises(WorkerUnavailableError), admit(admission):
        pass


@in_fake_time
async def test_a_drain_waits_for_the_streams_and_refuses_new_ones() -> None:
    admission = make_admission()

    async def stream() -> None:
        with admit(admission) as leg:
            await asyncio.sleep(0.05)
            assert not leg.is_migrating

    running = asyncio.create_task(stream())
    await asyncio.sleep(0)
    draining = asyncio.create_task(admission.drain(60.0))
    await asyncio.sleep(0)
    with pytest.raises(DrainingError), admit(admission, "b"):
        pass
    await asyncio.wait_for(draining, 1.0)
    await running


@in_fake_time
async def test_streams_left_near_the_end_of_a_drain_are_told_to_migrate() -> None:
    admission = make_admission()

    async def stream() -> None:
        told = asyncio.Event()
        with admit(admission) as leg:
            leg.when_migrating(told.set)
            await told.wait()
            assert leg.is_migrating

    running = asyncio.create_task(stream())
    await asyncio.sleep(0)
    await asyncio.wait_for(admission.drain(5.05), 1.0)
    await running


@in_fake_time
async def test_a_drain_waits_for_leases_too() -> None:
    admission = make_admission()
    busy = [True]
    draining = asyncio.create_task(admission.drain(60.0, is_busy=lambda: busy[0]))
    await asyncio.sleep(0.05)
    assert not draining.done()
    busy[0] = False
    await asyncio.wait_for(draining, 1.0)
