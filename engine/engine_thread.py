"""The one thread that touches the engine.

1. Verbs and reservations queue under the condition; both wake the thread.
2. A turn runs all verbs, tries the first reservations, then one step.
3. What came of the verbs leaves at once, what came of the step in one more piece of mail.
4. With nothing to do the thread says how things stand and sleeps on the condition until 1.
"""

import asyncio
import logging
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.beats import Beats
from engine.engine import Engine
from engine.load import StepOutput
from engine.request import Request, RequestOutput
from faults.plan import fault_point

logger = logging.getLogger(__name__)

_MAX_FAILING_STEPS = 5  # in a row; then the engine gives up, and its process shall be replaced
_INTEGRITY_PERIOD_S = 60.0  # the check runs when the thread goes idle, not more often than this

Future = asyncio.Future[Any]


class EngineFailedError(RuntimeError):
    """The engine gave up; only a new process helps."""


class EngineStoppedError(RuntimeError):
    """The engine was stopped."""


@dataclass(slots=True)
class Mail:
    """What the thread has for the event loop at one time."""

    replies: list[tuple[Future, Any, BaseException | None]] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    is_last: bool = False

    def __bool__(self) -> bool:
        return bool(self.replies or self.outputs or self.is_last)


class EngineThread:
    """Owns the thread and its queues. Invariant: every future that enters gets one reply."""

    def __init__(
        self,
        engine: Engine,
        *,
        post: Callable[[Mail], None],
        on_step: Callable[[StepOutput], None] | None,
        on_start: Callable[[Request], None] | None,
    ) -> None:
        self.failure: BaseException | None = None
        self.is_idle = True
        self.beats = Beats()
        self._engine = engine
        self._post = post
        self._on_step = on_step
        self._on_start = on_start
        self._wakeup = threading.Condition()
        # All four under the condition.
        self._verbs: deque[tuple[Callable[[Engine], Any], Future | None]] = deque()
        self._reservations: list[tuple[Request, Future]] = []  # by priority, then by age
        self._has_news = False
        self._is_stopping = False
        # The thread's own.
        self._num_failing_steps = 0
        self._last_check_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after its present turn."""
        with self._wakeup:
            self._is_stopping = True
            self._wake()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread.is_alive():
            self._thread.join()

    def send(self, verb: Callable[[Engine], Any], future: Future | None) -> None:
        """Queue a verb; RuntimeError when nobody will run it."""
        with self._wakeup:
            self._check_alive()
            self._verbs.append((verb, future))
            self._wake()

    def send_reservation(self, request: Request, future: Future) -> None:
        """Queue a request for room; RuntimeError when nobody will answer."""
        with self._wakeup:
            self._check_alive()
            insort(self._reservations, (request, future), key=lambda each: each[0].priority)
            self._wake()

    def _wake(self) -> None:
        self._has_news = True
        self._wakeup.notify()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailedError("the engine has failed") from self.failure
        if self._is_stopping:
            raise EngineStoppedError("the engine is stopped")

    # From here on: the thread

    def _run(self) -> None:
        error: BaseException = EngineStoppedError("the engine is stopped")
        self.beats.begin()
        try:
            self._take_turns()
        except Exception as failure:
            logger.exception("the engine gives up")
            error = failure
        self._end(error)

    def _take_turns(self) -> None:
        can_go_on = False
        while True:
            if not can_go_on and not self._engine.has_work():
                self._check_integrity()
            with self._wakeup:
                if not can_go_on and not self._has_news:
                    self.is_idle = True
                    self._wakeup.wait_for(lambda: self._has_news)
                self.beats.beat()
                self.is_idle = False
                self._has_news = False
                if self._is_stopping:
                    return
                verbs = list(self._verbs)
                self._verbs.clear()
            went_on, can_go_on = can_go_on, self._take_turn(verbs)
            if went_on and not can_go_on:
                # The last word before a rest: not every step was worth a report.
                self._report(StepOutput())

    def _take_turn(self, verbs: list[tuple[Callable[[Engine], Any], Future | None]]) -> bool:
        """One turn; whether the next one might get further without news."""
        mail = Mail()
        for verb, future in verbs:
            self._run_verb(verb, future, mail)
        self._try_reservations(mail)
        for landed in self._engine.take_landed():
            # Before what the verbs say of the same requests.
            self._report(landed)
            self._deliver(landed)
        if mail:
            # Now, not after the step: a granted peer can send its KV while the step runs.
            self._post(mail)
        fault_point("engine_heartbeat")
        self.beats.beat()
        step = self._engine.step(self._start) if self._engine.has_work() else StepOutput()
        if step.stats.num_tokens or verbs or mail:
            self._report(StepOutput(outputs=mail.outputs + step.outputs, stats=step.stats))
        self._deliver(step)
        return bool(step.stats.num_tokens or step.stats.num_preemptions)

    def _deliver(self, step: StepOutput) -> None:
        if step.outputs:
            self._post(Mail(outputs=step.outputs))
        self._count_failure(step)

    def _start(self, request: Request) -> None:
        if self._on_start is None:
            return
        try:
            self._on_start(request)
        except Exception:
            logger.exception("the observer of the engine's requests failed")

    def _report(self, step: StepOutput) -> None:
        if self._on_step is None:
            return
        try:
            self._on_step(step)
        except Exception:
            logger.exception("the observer of the engine's steps failed")

    def _run_verb(self, verb: Callable[[Engine], Any], future: Future | None, mail: Mail) -> None:
        result, error = None, None
        try:
            result = verb(self._engine)
        except Exception as raised:  # noqa: BLE001 - it goes to whoever sent the verb
            error = raised
        if isinstance(result, list):
            # The ends of a request's choices reach its stream, too.
            mail.outputs += [each for each in result if isinstance(each, RequestOutput)]
        if future is not None:
            mail.replies.append((future, result, error))
        elif error is not None:
            logger.error("a verb nobody waits for failed", exc_info=error)

    def _try_reservations(self, mail: Mail) -> None:
        """Grant from the front for as long as there is room: first come, first served."""
        while True:
            with self._wakeup:
                if not self._reservations:
                    return
                request, future = self._reservations[0]
            if not future.cancelled():
                reservation, error = None, None
                try:
                    reservation = self._engine.reserve(request)
                except ValueError as raised:
                    error = raised
                if reservation is None and error is None:
                    return
                mail.replies.append((future, reservation, error))
            with self._wakeup:
                # By then not always the first: a more urgent one may just have come.
                self._reservations.remove((request, future))

    def _count_failure(self, step: StepOutput) -> None:
        if step.stats.has_failed:
            self._num_failing_steps += 1
        elif step.stats.num_tokens:
            self._num_failing_steps = 0
        if self._num_failing_steps >= _MAX_FAILING_STEPS:
            raise EngineFailedError(f"{self._num_failing_steps} steps in a row have failed")

    def _check_integrity(self) -> None:
        now = time.monotonic()
        if now - self._last_check_s >= _INTEGRITY_PERIOD_S:
            self._last_check_s = now
            self._engine.check_integrity()

    def _end(self, error: BaseException) -> None:
        """Answer everybody who still waits; nobody can queue up any more."""
        with self._wakeup:
            self._is_stopping = True
            if not isinstance(error, EngineStoppedError):
                self.failure = error
            futures = [future for _, future in self._verbs if future is not None]
            futures += [future for _, future in self._reservations]
            self._verbs.clear()
            self._reservations.clear()
            self.is_idle = True
        self._post(Mail(replies=[(future, None, error) for future in futures], is_last=True))
