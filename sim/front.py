"""One simulated ingress: the router's own fleet, chooser, policy and line, on simulated time.

1. a request arrives: it stands in the line if others wait, else the chooser picks
2. the pick is counted, the message travels, the workers admit or refuse; who refused is avoided
3. its end, or a lost worker, is noted; a lost one's requests are picked again with what they have
"""

import random
import time
from collections.abc import Callable, Sequence

from router.chooser import Chooser, Openings, Pick
from router.fair_line import FairLine, Ticket
from router.fleet import Fleet
from router.policy import Policy
from router.typical_output import TypicalOutput
from router.worker_state import Change
from router.worker_view import WorkerKey
from sim.agenda import Agenda
from sim.attempt import SimAttempt
from sim.flight import Flight, SimPrompt
from sim.worker import Message, SimWorker

UNBOUNDED = 1 << 60
# Reading the clock of CPU time costs more than many a message: every so many batches are timed.
TIMED_BATCHES = 16


class Front:
    """Owns what one router knows. Invariant: each flight is in the line, in an attempt, or over."""

    def __init__(
        self,
        policy: Policy,
        agenda: Agenda,
        *,
        rng: random.Random,
        rpc_latency_s: float,
        on_end: Callable[[Flight], None],
    ) -> None:
        self.fleet = Fleet()
        self.chooser = Chooser(self.fleet, policy, rng=rng, now=agenda.now)
        self.typical = TypicalOutput()
        self.choosing_s = 0.0  # CPU
        self.applying_s = 0.0  # of state messages
        self.num_batches = 0
        self._agenda = agenda
        self._rpc_latency_s = rpc_latency_s
        self._on_end = on_end
        self._line: FairLine[Flight] = FairLine()
        self._processes: dict[WorkerKey, SimWorker] = {}
        self._had_none: tuple[Openings, Flight] | None = None  # with the openings then

    # Workers.

    def follow(self, worker: SimWorker) -> None:
        """Open its state stream."""
        state = self.fleet.add(worker.description, now_s=self._agenda.now_s)
        self._processes[worker.key] = worker
        sequence = 0

        def deliver(messages: Sequence[Message]) -> None:
            self._agenda.after(self._rpc_latency_s, lambda: apply(messages))

        def apply(messages: Sequence[Message]) -> None:
            nonlocal sequence
            if worker.key not in self._processes:
                return
            is_news = False
            self.num_batches += 1
            is_timed = self.num_batches % TIMED_BATCHES == 0
            start_s = time.thread_time() if is_timed else 0.0
            for message in messages:
                message.sequence = sequence
                sequence += 1
                is_news |= state.apply(message, now_s=self._agenda.now_s) is Change.ROUTING
            if is_timed:
                self.applying_s += TIMED_BATCHES * (time.thread_time() - start_s)
            if is_news:
                self._wake()

        worker.listen(deliver)

    def lose(self, key: WorkerKey) -> None:
        """Its stream and its calls broke."""
        state = self.fleet.states[key]
        del self._processes[key]
        state.disconnect(now_s=self._agenda.now_s)
        state.fail_attempts("its connection broke")
        self.fleet.remove(key)

    # Flights.

    def submit(self, flight: Flight) -> None:
        """A client's request, or one that must be picked again: such go first."""
        priority = 0 if flight.num_attempts else 1
        if self._line.num_before(priority) or not self._try(flight):
            num_tokens = flight.request.num_prompt_tokens
            ticket = Ticket(item=flight, tenant="", priority=priority, num_tokens=num_tokens)
            self._line.add(ticket, limit=UNBOUNDED)

    def _wake(self) -> None:
        while (ticket := self._line.head()) is not None:
            if not self._try(ticket.item):
                return
            self._line.remove(ticket)
            flight = ticket.item
            flight.waited_s = self._agenda.now_s - flight.request.arrived_s

    def _try(self, flight: Flight) -> bool:
        start_s = time.thread_time()
        taken = self._take(flight)
        self.choosing_s += time.thread_time() - start_s
        if taken is None:
            return False
        pick, pick_id = taken
        keys = [view.key for view in pick.decision.chosen.choice.workers]
        if not flight.num_attempts:
            flight.num_predicted = pick.num_predicted_tokens
            flight.prefill_id = keys[0].worker_id if len(keys) > 1 else ""
            flight.decode_id = keys[-1].worker_id
        flight.num_attempts += 1
        attempt = SimAttempt(
            flight,
            pick_id,
            [(self._processes[key], self.fleet.states[key]) for key in keys],
            on_end=self._ended,
            on_loss=self._lost,
        )
        self._agenda.after(self._rpc_latency_s, lambda: self._start(attempt))
        return True

    def _take(self, flight: Flight) -> tuple[Pick, int] | None:
        openings = self.chooser.openings()
        if (openings, flight) == self._had_none:
            return None
        num_output_tokens = self.typical.expected_tokens(UNBOUNDED)
        prompt = SimPrompt(flight=flight, num_output_tokens=num_output_tokens)
        if (pick := self.chooser.pick(prompt, flight.excluded)) is None:
            self._had_none = (openings, flight)
            return None
        return pick, self.chooser.take(prompt, pick)

    def _start(self, attempt: SimAttempt) -> None:
        refuser = attempt.find_refusal()
        if refuser is None:
            attempt.start()
            self._agenda.after(self._rpc_latency_s, lambda: self._acknowledge(attempt))
            return
        attempt.flight.num_refusals += 1
        self._agenda.after(self._rpc_latency_s, lambda: self._refused(attempt, refuser))

    def _acknowledge(self, attempt: SimAttempt) -> None:
        for _, state in attempt.workers:
            state.acknowledge_pick(attempt.pick_id)

    def _refused(self, attempt: SimAttempt, refuser: WorkerKey) -> None:
        for _, state in attempt.workers:
            state.drop_pick(attempt.pick_id)
        if refuser in self.fleet.states:
            self.fleet.states[refuser].refuse()
        self._again(attempt.flight, refuser)

    def _lost(self, attempt: SimAttempt, key: WorkerKey) -> None:
        self._agenda.after(0.0, lambda: self._again(attempt.flight, key))

    def _again(self, flight: Flight, avoided: WorkerKey) -> None:
        flight.excluded.add(avoided)
        self.submit(flight)

    def _ended(self, attempt: SimAttempt) -> None:
        flight = attempt.flight
        flight.finished_s = self._agenda.now_s + self._rpc_latency_s - flight.request.arrived_s
        self.typical.learn(flight.request.num_output_tokens)
        self._on_end(flight)

    @property
    def num_waiting(self) -> int:
        """Flights in the line."""
        return len(self._line)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the flights in the line."""
        return self._line.num_tokens
