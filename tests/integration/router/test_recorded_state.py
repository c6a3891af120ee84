"""What a live router decided, decided again by the simulator's on the recorded state."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from relevo.v1 import state_pb2

from engine.block_hash import BlockHash, hash_blocks
from router.chooser import Chooser, Pick
from router.config import RouterConfig
from router.fleet import Fleet
from router.prompt import Prompt
from router.router import Router
from router.worker_state import WorkerState
from sim.agenda import Agenda
from sim.flight import Flight, SimPrompt
from sim.front import Front
from sim.policies import make_policy
from sim.trace import TraceRequest
from tests.fake_worker_base import BLOCK_SIZE, HASH_ROOT, FakeWorker
from tests.integration.router.conftest import FakeCluster, collect

SEED = 11
TOLD = ("start_stream", "acknowledge_pick", "drop_pick", "refuse", "suspect", "disconnect")


class Recorder:
    """Writes down, with its time, all that a live router is told and decides.

    Its clock stands still while something is told, so that each event has one time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[float, str, tuple[Any, ...]]] = []
        self._frozen_s: float | None = None
        self._patch = monkeypatch
        self._wrap(Fleet, "add", lambda _, description, **__: (description,))
        self._wrap(Fleet, "remove", lambda _, key: (key,))
        self._wrap(WorkerState, "apply", _told_message)
        for name in TOLD:
            self._wrap(WorkerState, name, lambda state, *args, **_: (state.key, *args))
        # Luck decides between equals, and the router's other parts use it up, too.
        self.rng = random.Random(SEED)
        luck = self.rng.getstate
        self._wrap(Chooser, "pick", lambda _, prompt, excluded=(): (luck(), prompt, excluded))
        self._wrap(Chooser, "take", lambda _, prompt, pick: (luck(), prompt))

    def now(self) -> float:
        return time.monotonic() if self._frozen_s is None else self._frozen_s

    def _wrap(self, owner: type, name: str, facts: Callable[..., tuple[Any, ...]]) -> None:
        original = getattr(owner, name)

        def recorded(subject: Any, *args: Any, **options: Any) -> Any:
            outer_s, self._frozen_s = self._frozen_s, self.now()
            if "now_s" in options:
                options["now_s"] = self._frozen_s
            entry = (self._frozen_s, name, facts(subject, *args, **options))
            try:
                result = original(subject, *args, **options)
                self.events.append((*entry[:2], (*entry[2], result)))
                return result
            finally:
                self._frozen_s = outer_s

        self._patch.setattr(owner, name, recorded)


def _told_message(state: WorkerState, message: Any, **_: Any) -> tuple[Any, ...]:
    return state.key, message.SerializeToString()


class Replay:
    """The simulator's front, told the same at the same times."""

    def __init__(self) -> None:
        self.rng = random.Random()
        self.agenda = Agenda()
        self.front = Front(
            make_policy("relevo", self.rng),
            self.agenda,
            rng=self.rng,
            rpc_latency_s=0.0,
            on_end=lambda _: None,
        )
        self.decisions: list[tuple[Any, ...] | None] = []
        self._pick: Pick | None = None

    def tell(self, time_s: float, name: str, facts: tuple[Any, ...]) -> None:
        self.agenda.now_s = time_s
        fleet = self.front.fleet
        if name == "add":
            fleet.add(facts[0], now_s=time_s)
        elif name == "remove":
            fleet.remove(facts[0])
        elif name == "apply":
            message = state_pb2.WatchStateResponse.FromString(facts[1])
            fleet.states[facts[0]].apply(message, now_s=time_s)
        elif name == "disconnect":
            fleet.states[facts[0]].disconnect(now_s=time_s)
        elif name in TOLD:
            getattr(fleet.states[facts[0]], name)(*facts[1:-1])
        elif name == "pick":
            luck, prompt, excluded, pick = facts
            self.rng.setstate(luck)
            self._pick = self.front.chooser.pick(_as_simulated(prompt), excluded)
            self.decisions.append(_describe(self._pick))
            assert self.decisions[-1] == _describe(pick), len(self.decisions)
        else:
            assert name == "take"
            luck, prompt, pick_id = facts
            self.rng.setstate(luck)
            assert self._pick is not None
            assert self.front.chooser.take(_as_simulated(prompt), self._pick) == pick_id


def _as_simulated(prompt: Prompt) -> SimPrompt:
    request = TraceRequest(
        arrived_s=0.0, num_prompt_tokens=len(prompt), num_output_tokens=1, block_ids=()
    )
    # All fakes name their blocks alike.
    names = next(iter(prompt._names.values()), [])
    flight = Flight(request=request, names=names)
    return SimPrompt(flight=flight, num_output_tokens=prompt.num_output_tokens)


def _describe(pick: Pick | None) -> tuple[Any, ...] | None:
    if pick is None:
        return None
    chosen = pick.decision.chosen
    workers = tuple(worker.key.worker_id for worker in chosen.choice.workers)
    return (*workers, chosen.cost.total_s, pick.num_predicted_tokens, pick.decision.num_choices)


async def live_through(cluster: FakeCluster) -> None:
    """Prompts of three families, caches and loads that change, refusals, and a death."""
    rng = random.Random(3)
    families = [[number * 7 % 90 + family for number in range(80)] for family in range(3)]

    async def ask(number: int) -> None:
        prompt = [*families[number % 3][: 20 + 4 * (number % 13)], number, number]
        request_id = f"r{number}"
        assert await collect(cluster.generate(prompt, max_tokens=3, request_id=request_id))
        worker = rng.choice([each for each in cluster.workers if each.description])
        _change(worker, prompt, rng)

    for start in range(0, 45, 15):
        await asyncio.gather(*(ask(number) for number in range(start, start + 15)))
        if start == 0:
            for worker in cluster.workers:  # whoever is chosen refuses once
                worker.num_refusals = 1
        if start == 15:
            await cluster.workers[1].stop()
            cluster.forget(cluster.workers.pop(1))


def _change(worker: FakeWorker, prompt: list[int], rng: random.Random) -> None:
    hashes = hash_blocks(prompt, block_size=BLOCK_SIZE, root=BlockHash(HASH_ROOT))
    worker.publish(stored=[each for each in hashes if each not in worker.block_hashes])
    worker.load.num_running = rng.randrange(6)
    worker.load.num_waiting_uncached_tokens = rng.randrange(400)
    worker.load.num_promised_tokens = rng.randrange(100)
    worker.touch()


async def test_the_simulators_router_decides_as_the_live_one_did(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    for number in range(3):
        await cluster.add_prefill(f"prefill-{number}", prefill_s=0.02)
        await cluster.add_decode(f"decode-{number}", step_s=0.005)
    cluster.router = Router(
        RouterConfig(local_prefill="auto"),
        cluster.discovery,
        cluster.channels,
        ingress_id="recorded",
        now=recorder.now,
        rng=recorder.rng,
    )
    await cluster.router.start()
    await cluster.until(lambda: cluster.router.status()["state"] == "ready")
    await live_through(cluster)
    monkeypatch.undo()

    events = list(recorder.events)
    replay = Replay()
    for event in events:
        replay.tell(*event)
    assert len(replay.decisions) >= 45
    assert len({decision[0] for decision in replay.decisions if decision}) > 3
    assert len([decision for decision in replay.decisions if decision and len(decision) == 5]) > 5
    names = [name for _, name, _ in events]
    assert "refuse" in names
    assert "disconnect" in names
