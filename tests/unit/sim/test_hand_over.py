import pytest

from router.worker_view import DECODE
from sim.agenda import Agenda
from sim.hand_over import HandOver
from tests.unit.sim.worlds import Log, run, worker


class Pair:
    """A prefill and a decode worker, and one prompt from one to the other."""

    def __init__(self, **facts: float) -> None:
        self.agenda = Agenda()
        self.prefill = worker(self.agenda, **facts)
        self.decode = worker(self.agenda, pool=DECODE, **facts)
        self.source_log, self.log = Log(self.agenda), Log(self.agenda)
        self.arrived_s: float | None = None

    def hand_over(self, num_prompt: int = 300, num_output: int = 6) -> HandOver:
        source = self.source_log.job(num_prompt, 1, is_kept=True)
        target = self.log.job(num_prompt, num_output)

        def arrived() -> None:
            self.arrived_s = self.agenda.now_s
            self.prefill.engine.release(source)
            target.num_generated = 1
            self.decode.engine.activate(target)

        subject = HandOver(self.prefill, self.decode, target, on_arrival=arrived)
        source.on_chunk = lambda job: subject.offer(job.num_computed)
        self.prefill.engine.add(source)
        return subject


def test_pieces_travel_while_the_prompt_is_computed() -> None:
    pair = Pair(link_bytes_per_s=2e6)
    pair.hand_over()
    run(pair.agenda)
    # 300 kB at 2 MB/s take 0.15 s, of which only the last 100 kB come after the computation.
    assert pair.arrived_s == pytest.approx(0.3 + 0.05)
    assert pair.log.ended_s == pytest.approx(0.35 + 5 * 0.01)
    assert pair.prefill.engine.cache.num_used == pair.decode.engine.cache.num_used == 0
    assert pair.prefill.num_transferring == pair.decode.num_transferring == 0


def test_a_slow_line_queues_the_pieces() -> None:
    pair = Pair(link_bytes_per_s=0.5e6)
    pair.hand_over()
    run(pair.agenda)
    assert pair.arrived_s == pytest.approx(0.1 + 300e3 / 0.5e6)


def test_only_what_the_decode_worker_lacks_travels() -> None:
    pair = Pair(link_bytes_per_s=0.1e6)
    pair.decode.engine.add(Log(pair.agenda).job(200, 1))
    run(pair.agenda)
    start_s = pair.agenda.now_s
    pair.hand_over()
    run(pair.agenda)
    assert pair.arrived_s == pytest.approx(start_s + 0.3 + 100e3 / 0.1e6)


def test_without_room_on_the_decode_worker_nothing_travels() -> None:
    pair = Pair(num_kv_tokens=500)
    blocker = Log(pair.agenda)
    pair.decode.engine.add(blocker.job(210, 100, start=500))
    pair.hand_over()
    run(pair.agenda)
    assert blocker.ended_s is not None
    assert pair.arrived_s == pytest.approx(blocker.ended_s + 0.3)


def test_one_that_was_ended_never_arrives() -> None:
    pair = Pair()
    subject = pair.hand_over()
    pair.agenda.run(lambda: False, until_s=0.15)
    subject.end()
    run(pair.agenda)
    assert pair.arrived_s is None
    assert pair.prefill.num_transferring == pair.decode.num_transferring == 0
