"""KV on its way from a simulated prefill worker to a decode worker, piece by piece.

    chunk computed ──► offered ──► (room on the decode worker) ──► both ends free ──► arrived
    last piece arrived ──► the decode worker runs the request, the prefill worker lets its blocks go

A worker's own line carries one piece at a time, whoever is at the other end.
"""

from collections.abc import Callable

from sim.job import Job
from sim.worker import SimWorker


class HandOver:
    """Owns one transfer. Invariant: after `end` no event of it changes anything."""

    def __init__(
        self, source: SimWorker, target: SimWorker, job: Job, *, on_arrival: Callable[[], None]
    ) -> None:
        self._source = source
        self._target = target
        self._job = job  # on the decode worker
        self._on_arrival = on_arrival
        self._num_offered = 0
        self._num_asked = 0  # posted to the line
        self._num_arrived = 0
        self._has_asked_room = False
        self._has_room = False
        self._is_over = False
        self._is_promised = True
        source.num_transferring += 1
        target.num_transferring += 1
        target.num_promised_tokens += job.num_prompt_tokens

    def offer(self, num_tokens: int) -> None:
        """The prefill worker has this much of the prompt."""
        self._num_offered = num_tokens
        if not self._has_asked_room:
            self._has_asked_room = True
            self._target.engine.reserve(self._job, self._got_room)
        elif self._has_room:
            self._send()

    def end(self) -> None:
        """Nothing more is to arrive."""
        if not self._is_over:
            self._is_over = True
            self._source.num_transferring -= 1
            self._target.num_transferring -= 1
            self._keep_promise()

    def _got_room(self) -> None:
        if self._is_over:
            return
        self._has_room = True
        self._keep_promise()
        # What the decode worker holds needs not travel; the last token's KV always does.
        self._num_asked = self._num_arrived = self._job.num_cached
        self._send()

    def _keep_promise(self) -> None:
        if self._is_promised:
            self._is_promised = False
            self._target.num_promised_tokens -= self._job.num_prompt_tokens

    def _send(self) -> None:
        num_tokens = self._num_offered - self._num_asked
        if num_tokens <= 0:
            return
        self._num_asked = self._num_offered
        hardware = self._source.engine.hardware
        num_bytes = num_tokens * hardware.kv_bytes_per_token
        agenda = self._source.agenda
        start_s = max(agenda.now_s, self._source.line_free_s, self._target.line_free_s)
        end_s = start_s + num_bytes / hardware.link_bytes_per_s
        self._source.line_free_s = self._target.line_free_s = end_s
        self._target.expect_bytes(self._source.key, num_bytes)
        agenda.at(end_s + hardware.link_latency_s, lambda: self._arrive(num_tokens, num_bytes))

    def _arrive(self, num_tokens: int, num_bytes: int) -> None:
        self._target.expect_bytes(self._source.key, -num_bytes)
        if self._is_over or not (self._source.is_alive and self._target.is_alive):
            return
        self._num_arrived += num_tokens
        if self._num_arrived == self._job.num_prompt_tokens:
            self.end()
            self._on_arrival()
