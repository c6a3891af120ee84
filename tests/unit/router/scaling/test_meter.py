"""What the meter sees of simulated workers, and what the autoscaler makes of it."""

import random

import pytest

from router.fleet import Fleet
from router.scaling.autoscaler import Autoscaler
from router.scaling.meter import LoadMeter
from router.worker_view import DECODE, PREFILL, WorkerKey
from sim.agenda import Agenda
from sim.front import Front
from sim.policies import make_policy
from sim.worker import SimWorker
from tests.unit.router.scaling.loads import config
from tests.unit.sim import worlds


class World:
    """One ingress, and workers that compute 1,000 prompt tokens a second."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        rng = random.Random(1)
        self.front = Front(
            make_policy("relevo", rng, local_prefill="never"),
            self.agenda,
            rng=rng,
            rpc_latency_s=0.0,
            on_end=lambda _: None,
        )
        self.meter = LoadMeter(self.front.fleet)
        self.workers: list[SimWorker] = []

    def start(self, pool: str, number: int = 0) -> SimWorker:
        worker = worlds.worker(self.agenda, number, pool)
        self.workers.append(worker)
        self.front.follow(worker)
        self.run_until(self.agenda.now_s)
        return worker

    def run_until(self, time_s: float) -> None:
        self.agenda.at(time_s, lambda: None)
        self.agenda.run(lambda: False, until_s=time_s)

    @property
    def fleet(self) -> Fleet:
        return self.front.fleet


def test_prompts_that_wait_and_prompts_that_were_computed_are_counted() -> None:
    world = World()
    worker = world.start(PREFILL)
    log = worlds.Log(world.agenda)
    worker.engine.add(log.job(3000, 1))
    first = world.meter.look(world.agenda.now_s, queued_requests=2, queued_tokens=70)
    assert (first.queued_requests, first.queued_tokens) == (2, 70)
    assert first.prefill.num_workers == 1
    assert first.decode.num_workers == 0
    world.run_until(1.5)
    later = world.meter.look(1.5, queued_requests=0, queued_tokens=0)
    assert later.prefill.waiting_tokens == pytest.approx(1500, abs=150)
    assert later.prefill.computed_tokens_per_s == pytest.approx(1000.0, rel=0.15)
    assert later.prefill.token_s == pytest.approx(0.0011, rel=0.2)
    world.run_until(30.0)
    for second in range(30, 45):
        idle = world.meter.look(float(second), queued_requests=0, queued_tokens=0)
    assert idle.prefill.computed_tokens_per_s == 0.0


def test_a_worker_that_left_takes_its_counter_with_it() -> None:
    world = World()
    worker = world.start(PREFILL)
    worker.engine.add(worlds.Log(world.agenda).job(1000, 1))
    world.run_until(2.0)
    world.meter.look(2.0, queued_requests=0, queued_tokens=0)
    world.front.lose(worker.key)
    world.start(PREFILL, number=1)
    load = world.meter.look(3.0, queued_requests=0, queued_tokens=0)
    assert load.prefill.computed_tokens_per_s == 0.0


def test_a_worker_that_drains_is_no_worker_any_more() -> None:
    world = World()
    world.start(DECODE)
    leaver = world.start(DECODE, number=1)
    assert world.meter.num_serving(DECODE) == 2
    leaver.drain()
    world.run_until(1.0)
    assert world.meter.num_serving(DECODE) == 1


def test_streams_and_their_blocks_are_added_up() -> None:
    world = World()
    worker = world.start(DECODE)
    log = worlds.Log(world.agenda)
    for start in (0, 1000):
        worker.engine.add(log.job(500, 500, start=start))
    world.run_until(2.0)
    decode = world.meter.look(2.0, queued_requests=0, queued_tokens=0).decode
    assert decode.num_streams == 2
    assert decode.max_streams == 4.0
    assert decode.kv_tokens == 2000
    assert decode.max_kv_tokens == 10_000.0
    assert decode.step_s + decode.streams_s == pytest.approx(0.01, rel=0.3)


def test_nothing_is_wished_for_before_requests_can_be_served() -> None:
    world = World()
    is_ready = False
    autoscaler = Autoscaler(config(), world.meter, is_ready=lambda: is_ready, now=world.agenda.now)
    assert autoscaler.tick(queued_requests=0, queued_tokens=0) == {}
    assert autoscaler.status() == {}
    world.start(PREFILL)
    world.start(DECODE)
    is_ready = True
    wishes = autoscaler.tick(queued_requests=0, queued_tokens=0)
    assert wishes == {PREFILL: (1, True), DECODE: (1, True)}
    world.start(DECODE, number=1)
    assert autoscaler.tick(queued_requests=0, queued_tokens=0)[DECODE] == (2, True)
    world.run_until(31.0)
    assert autoscaler.tick(queued_requests=0, queued_tokens=0)[DECODE].is_floor is False


def test_the_status_tells_the_target_and_why() -> None:
    world = World()
    worker = world.start(PREFILL)
    world.start(DECODE)
    autoscaler = Autoscaler(config(), world.meter, is_ready=lambda: True, now=world.agenda.now)
    worker.engine.add(worlds.Log(world.agenda).job(4900, 1))
    worker.engine.add(worlds.Log(world.agenda).job(4900, 1, start=9000))
    for second in range(8):
        world.run_until(float(second))
        targets = autoscaler.tick(queued_requests=0, queued_tokens=0)
    assert targets[PREFILL].target == 2
    shown = autoscaler.status()[PREFILL]
    assert isinstance(shown, dict)
    assert (shown["target"], shown["serving"], shown["min"], shown["max"]) == (2, 1, 1, 8)
    assert "uncached prompt tokens wait" in shown["reason"]
    assert shown["demand"] > 2.0
    assert world.fleet.states[WorkerKey("prefill-0", 1)].state == "ready"
