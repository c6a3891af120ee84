"""One try to serve a flight on chosen workers, as `router/attempt.py` makes it over the wire.

both workers admit it ──► prompt computed ──► hand-over ──► decoded ──► over
one refuses, or is lost ──► all it had elsewhere is given back, the front tries again
"""

from collections.abc import Callable, Sequence

from router.worker_state import WorkerState
from router.worker_view import WorkerKey
from sim.flight import Flight
from sim.hand_over import HandOver
from sim.job import Job
from sim.worker import SimWorker


class SimAttempt:
    """Owns a flight's jobs. Invariant: when it is over, no worker has anything of it."""

    def __init__(
        self,
        flight: Flight,
        pick_id: int,
        workers: Sequence[tuple[SimWorker, WorkerState]],  # prefill if any, then decode
        *,
        on_end: Callable[["SimAttempt"], None],
        on_loss: Callable[["SimAttempt", WorkerKey], None],
    ) -> None:
        self.flight = flight
        self.pick_id = pick_id
        self.workers = workers
        self._on_end = on_end
        self._on_loss = on_loss
        self._jobs: list[tuple[SimWorker, Job]] = []
        self._hand_over: HandOver | None = None
        self._is_over = False

    def find_refusal(self) -> WorkerKey | None:
        """Who of them is gone or does not take it."""
        for worker, _ in self.workers:
            if not worker.is_alive or worker.refuses():
                return worker.key
        return None

    def start(self) -> None:
        """Both have admitted it."""
        for _, state in self.workers:
            state.attempts.add(self)
        decode, _ = self.workers[-1]
        job = self._make_job()
        if len(self.workers) == 1:
            self._jobs.append((decode, job))
            decode.engine.add(job)
        else:
            self._start_pair(self.workers[0][0], decode, job)

    def _make_job(self, *, is_kept: bool = False) -> Job:
        flight, request = self.flight, self.flight.request
        num_left = request.num_output_tokens - flight.num_generated
        return Job(
            names=flight.names,
            num_prompt_tokens=request.num_prompt_tokens + flight.num_generated,
            num_output_tokens=1 if is_kept else num_left,
            on_chunk=self._chunk_done,
            on_token=self._first_token,
            on_end=lambda _: None if is_kept else self._finish(),
            is_kept=is_kept,
        )

    def _start_pair(self, prefill: SimWorker, decode: SimWorker, job: Job) -> None:
        source = self._make_job(is_kept=True)
        self._jobs += [(decode, job), (prefill, source)]
        self._hand_over = HandOver(prefill, decode, job, on_arrival=self._arrived)
        prefill.engine.add(source)

    def _chunk_done(self, job: Job) -> None:
        if self._hand_over is not None and self._jobs[0][1].num_output_tokens > 1:
            self._hand_over.offer(job.num_computed)

    def _first_token(self, job: Job) -> None:
        flight, worker = self.flight, self.workers[0][0]
        self._jobs[0][1].num_generated = 1
        if flight.first_token_s is None:
            flight.num_cached = job.num_cached
            flight.first_token_s = (
                worker.agenda.now_s
                + worker.engine.hardware.rpc_latency_s
                - flight.request.arrived_s
            )
        if self._hand_over is not None and self._jobs[0][1].num_output_tokens == 1:
            self._finish()

    def _arrived(self) -> None:
        (decode, job), (prefill, source) = self._jobs
        self._jobs = [(decode, job)]
        # Its part is done: what happens to it from here on is nothing to us.
        self.workers[0][1].attempts.discard(self)
        prefill.engine.release(source)
        decode.engine.activate(job)

    def _finish(self) -> None:
        self._close()
        self._on_end(self)

    def lose_worker(self, key: WorkerKey, reason: str) -> None:
        """One of the workers is gone (`router.worker_state.RunningAttempt`)."""
        del reason
        if self._is_over:
            return
        flight, (decode, job) = self.flight, self._jobs[0]
        flight.num_generated += decode.engine.running.num_generated(job)
        self._close()
        self._on_loss(self, key)

    def _close(self) -> None:
        self._is_over = True
        if self._hand_over is not None:
            self._hand_over.end()
        for worker, job in self._jobs:
            if worker.is_alive:
                worker.engine.cancel(job)
        for _, state in self.workers:
            state.attempts.discard(self)
            state.drop_pick(self.pick_id)
