"""A worker as a process: its first line, its signals, its health."""

import asyncio
import json
import os
import signal

import pytest

from rpc.description import WorkerDescription
from rpc.pulse import check_pulse
from rpc.start_clock import StartClock
from workers import process

DESCRIPTION = WorkerDescription(
    worker_id="decode-0", pool="decode", incarnation=1, address="a:1", node_id="", pid=2
)


class FakeWorker:
    def __init__(self, *, is_ill: bool = False, drain_takes_s: float = 0.0) -> None:
        self.calls: list[str] = []
        self._is_ill = is_ill
        self._drain_takes_s = drain_takes_s

    async def start(self, clock: StartClock | None) -> WorkerDescription:
        self.calls.append("start")
        return DESCRIPTION

    async def drain(self, drain_s: float) -> None:
        self.calls.append("drain")
        await asyncio.sleep(self._drain_takes_s)
        self.calls.append("drained")

    async def stop(self) -> None:
        self.calls.append("stop")

    def check_health(self) -> None:
        if self._is_ill:
            raise RuntimeError("ill")


async def test_sigterm_drains_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    worker = FakeWorker()
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
    assert await process.serve_until_signalled(worker, drain_s=1.0) == 0
    assert worker.calls == ["start", "drain", "drained", "stop"]
    line = json.loads(capsys.readouterr().out)
    assert WorkerDescription.from_dict(line) == DESCRIPTION


async def test_a_second_sigterm_cuts_the_drain_short() -> None:
    worker = FakeWorker(drain_takes_s=60.0)
    for delay_s in (0.05, 0.1):
        asyncio.get_running_loop().call_later(delay_s, os.kill, os.getpid(), signal.SIGTERM)
    assert await process.serve_until_signalled(worker, drain_s=60.0) == 0
    assert worker.calls == ["start", "drain", "stop"]


async def test_a_worker_that_stays_ill_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "HEALTH_PERIOD_S", 0.01)
    worker = FakeWorker(is_ill=True)
    assert await process.serve_until_signalled(worker, drain_s=1.0) == 1
    assert worker.calls == ["start", "stop"]


class Beat:
    def __init__(self, age_s: float, predicted_step_s: float, waited_s: float = 0.0) -> None:
        self.age_s = age_s
        self.waited_s = waited_s
        self.predicted_step_s = predicted_step_s


def test_a_pulse_is_missed_after_two_seconds_or_four_steps() -> None:
    check_pulse(Beat(1.9, 0.1), None)
    check_pulse(Beat(3.9, 1.0), None)
    for beat, failure in (
        (Beat(2.1, 0.1), None),
        (Beat(4.1, 1.0), None),
        (Beat(0.0, 0.0), ValueError("gone")),
    ):
        with pytest.raises(RuntimeError):
            check_pulse(beat, failure)


def test_an_engine_that_others_keep_from_the_cores_is_alive() -> None:
    check_pulse(Beat(6.4, 1.0, waited_s=2.5), None)
    with pytest.raises(RuntimeError, match=r"no life for 6\.7 s"):
        check_pulse(Beat(6.7, 1.0, waited_s=2.5), None)
