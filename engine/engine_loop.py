"""The way from an event loop to the engine's thread and back."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.engine import Engine
from engine.engine_thread import EngineFailedError, EngineStoppedError, EngineThread, Future, Mail
from engine.load import StepOutput
from engine.request import FinishReason, Request, RequestOutput, Reservation
from engine.request_stream import RequestStream

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sign of life of the engine's thread."""

    age_s: float  # since the thread last showed life; 0 when idle
    waited_s: float  # of that, ready to run while others had the cores
    predicted_step_s: float  # of the step that runs; 0 when idle
    is_idle: bool


class EngineLoop:
    """Owns the engine's thread and the streams of its requests.

    Invariant: a stream that is open when the engine ends gets a last output, like every other.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[StepOutput], None] | None = None,
        on_start: Callable[[Request], None] | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Steps and starts are observed on the engine's thread: after a step, before a request's
        first one; that the engine gave up, on the event loop.
        """
        self._engine = engine
        self._on_failure = on_failure
        self._thread = EngineThread(engine, post=self._post, on_step=on_step, on_start=on_start)
        self._streams: dict[str, RequestStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def failure(self) -> BaseException | None:
        """Why the engine gave up, or None while it serves."""
        return self._thread.failure

    def start(self) -> None:
        """Start the thread; what it has to say goes to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its present step; open streams end with ABORT."""
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    async def call(self, verb: Callable[[Engine], T]) -> T:
        """Run a verb on the engine's thread, between two steps.

        The verb runs even when the caller is cancelled meanwhile. RequestOutputs that it returns
        (of `activate`, `abort`, `release`) also go to the request's stream.
        """
        future: asyncio.Future[T] = self._new_future()
        self._thread.send(verb, future)
        return await future

    def open_stream(self, request_id: str, choices: Iterable[int] = (0,)) -> RequestStream:
        """Listen to a request from now on, until each of these choices has ended."""
        if request_id in self._streams:
            raise ValueError(f"Got {request_id = } but expected one without a stream")
        stream = RequestStream(request_id, self._forget_stream, choices=choices)
        self._streams[request_id] = stream
        return stream

    async def submit(self, request: Request) -> RequestStream:
        """Add a request and listen to it; ValueError when it can never be served."""
        stream = self.open_stream(request.request_id, request.choices)
        try:
            await self.call(lambda engine: engine.add_request(request))
        except asyncio.CancelledError:
            stream.close()
            self.abort(request.request_id)
            raise
        except Exception:
            stream.close()
            raise
        return stream

    async def reserve(self, request: Request) -> Reservation:
        """Wait for room for the request's KV, first come first served within a priority."""
        future: asyncio.Future[Reservation] = self._new_future()
        self._thread.send_reservation(request, future)
        try:
            return await future
        except asyncio.CancelledError:
            # Queued behind a grant that may have been made a moment ago.
            self.abort(request.request_id)
            raise

    def abort(self, request_id: str, *, in_flight: Sequence[int] = ()) -> None:
        """End a request in any state; from any thread, and harmless at any time.

        Blocks in `in_flight`, which a link may still read or write, are kept from reuse until
        `end_quarantine`.
        """
        self._tell(lambda engine: engine.abort(request_id, in_flight=in_flight))

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        """No link reads or writes these blocks any more; as harmless."""
        self._tell(lambda engine: engine.end_quarantine(block_ids))

    def abort_choice(self, request_id: str, choice_index: int) -> None:
        """End one choice of a request; the same way."""
        self._tell(lambda engine: engine.abort_choice(request_id, choice_index))

    def heartbeat(self) -> Heartbeat:
        """Sign of life; from any thread."""
        is_idle = self._thread.is_idle
        return Heartbeat(
            age_s=0.0 if is_idle else self._thread.beats.age_s(),
            waited_s=0.0 if is_idle else self._thread.beats.waited_s(),
            predicted_step_s=0.0 if is_idle else self._engine.predicted_step_s,
            is_idle=is_idle,
        )

    def _tell(self, verb: Callable[[Engine], object]) -> None:
        # An engine that has ended holds no request any more.
        with contextlib.suppress(EngineFailedError, EngineStoppedError):
            self._thread.send(verb, None)

    def _new_future(self) -> Future:
        assert self._loop is not None, "start() comes first"
        return self._loop.create_future()

    def _forget_stream(self, stream: RequestStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]

    def _post(self, mail: Mail) -> None:
        """From the engine's thread: one call per step, however many requests it moved."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._receive, mail)
        except RuntimeError:
            logger.warning("the event loop is closed; the engine's last words are lost")

    def _receive(self, mail: Mail) -> None:
        for future, result, error in mail.replies:
            if future.done():
                continue  # cancelled by its caller
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        for output in mail.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.deliver(output)
        if mail.is_last:
            self._end_streams()
            if self.failure is not None:
                self._on_failure()

    def _end_streams(self) -> None:
        failure = self.failure
        ends = [(s, index) for s in self._streams.values() for index in sorted(s.open_choices)]
        for stream, choice_index in ends:
            stream.deliver(
                RequestOutput(
                    request_id=stream.request_id,
                    choice_index=choice_index,
                    start_position=0,
                    token_ids=(),
                    num_computed_tokens=0,
                    num_cached_tokens=0,
                    finish_reason=FinishReason.ABORT if failure is None else FinishReason.ERROR,
                    error=None if failure is None else f"the engine has failed: {failure}",
                )
            )
