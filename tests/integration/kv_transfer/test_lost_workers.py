"""A prefill worker that dies or freezes, whatever its hand-over is at, costs its own link only.

Its decode worker serves others all the while, and every block of its pool finds its owner again.
`RELEVO_SOAK_MINUTES` runs all of it; else what costs no deadline.
"""

import asyncio
import signal
import time
from contextlib import suppress

import pytest

from faults.plan import Fault, FaultPlan
from kv_transfer.control import TransferFailedError
from tests.integration.kv_transfer.conftest import CONFIG, NUM_BLOCKS, Decode
from tests.long_form import LONG_FORM
from tests.unit.kv_transfer.fakes import eventually

NUM_TOKENS = 60
# of a transfer with the other worker, while the first one is gone
LONGEST_PAUSE_S = CONFIG["transfer_timeout_s"]
# what its hand-over is at -> how the prompt is computed there: (chunk, pause between chunks)
STATES = {
    "computing, nothing offered": (NUM_TOKENS, 0.5),
    "computing, chunks on their way": (8, 0.1),
    "granted, nothing sent": (NUM_TOKENS, 0.0),
    "committed, not received": (NUM_TOKENS, 0.0),
}
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


def cases() -> list[object]:
    return [
        pytest.param(
            state,
            fate,
            id=f"{fate}-{state}",
            marks=() if fate == "killed" else LONG_FORM,
        )
        for state in STATES
        for fate in SIGNALS
    ]


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("state", "fate"), cases())
async def test_a_worker_that_is_lost_costs_its_own_transfer(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, state: str, fate: str
) -> None:
    chunk, delay_s = STATES[state]
    faults = []
    if state == "granted, nothing sent":
        faults = [{"point": "kv_send", "action": {"killed": "kill", "frozen": "freeze"}[fate]}]
    await decode.start(8, 8, faults_of_first=faults)
    lost, link = decode.prefills["prefill-0"], decode.dialer.link_for("prefill-0")
    if state == "committed, not received":
        plan = FaultPlan([Fault(match={}, point="kv_recv", action="delay", delay_s=0.3)], None)
        monkeypatch.setattr("faults.plan._PLAN", plan)
    moving = asyncio.create_task(
        decode.hand_over(num_tokens=NUM_TOKENS, chunk=chunk, delay_s=delay_s)
    )
    if "nothing offered" in state:
        await asyncio.sleep(0.1)
    else:
        await eventually(lambda: link.queued_bytes or moving.done())
        await asyncio.sleep(0.1)
    with suppress(ProcessLookupError):
        lost.signal(SIGNALS[fate])

    for _ in range(3):
        started = time.monotonic()
        await decode.hand_over("prefill-1", num_tokens=NUM_TOKENS)
        assert time.monotonic() - started < LONGEST_PAUSE_S
    noticed_within_s = {"killed": 20.0, "frozen": CONFIG["transfer_timeout_s"] + 1}[fate]
    await asyncio.wait({moving}, timeout=noticed_within_s)
    if not moving.done():
        assert fate == "frozen", "a death is noticed by the end of its sockets"
        moving.cancel()  # nothing was asked of it: the worker above sees that it is frozen
    (outcome,) = await asyncio.gather(moving, return_exceptions=True)
    # over shared memory the copy of what was lent goes on without its owner
    assert outcome is None or isinstance(outcome, TransferFailedError | asyncio.CancelledError)

    if fate == "killed":
        await lost.stop()
        await lost.start()
    else:
        lost.signal(signal.SIGCONT)
    await decode.link_up()
    await decode.hand_over(num_tokens=NUM_TOKENS)
    await eventually(lambda: not decode.quarantined)
    assert sorted(decode.free_blocks) == list(range(NUM_BLOCKS))
