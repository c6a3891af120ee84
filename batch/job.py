"""Runs a batch to its end, or until it is stopped; what is done stays done.

A refusal is no failure: the request waits its turn again, as long as it takes. A request that got
no answer, or an answer that blames the server, is sent again a few times; then its line says so.
If the server is away (no answer, or 503) for `patience_s` the job gives up, and can be run again.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable
from typing import Any, Final, Protocol

from batch.input_file import InputFile, InputLine
from batch.output_file import OutputFile
from batch.pacer import Pacer
from batch.sender import Answer

MAX_ATTEMPTS: Final = 4  # of a request that breaks
PAUSE_S: Final = 0.5  # after the first; doubles


class GaveUpError(RuntimeError):
    """The server did not answer for too long; the message is one line."""


class Sending(Protocol):
    """Whoever sends one request."""

    async def send(self, line: InputLine) -> Answer:
        """Return the answer; ConnectionError where none came."""
        ...


class Job:
    """One input, one output, one server."""

    def __init__(  # noqa: PLR0913 - what a job is made of
        self,
        source: InputFile,
        output: OutputFile,
        sender: Sending,
        pacer: Pacer,
        *,
        patience_s: float,
        now: Callable[[], float] = time.monotonic,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._output = output
        self._sender = sender
        self._pacer = pacer
        self._patience_s = patience_s
        self._now = now
        self._told = told  # called after each line
        self._heard_at_s = now()  # when the server last answered anything
        self.num_refusals = 0

    async def run(self) -> None:
        """Send all that have no line yet; GaveUpError when it is no use."""
        try:
            async with asyncio.TaskGroup() as group:
                for line in self._source.lines():
                    if line.custom_id in self._output.done:
                        continue
                    if line.fault:
                        self._fail(line, "invalid_request", line.fault)
                        continue
                    has_place = asyncio.Event()
                    group.create_task(self._finish(line, has_place))
                    await has_place.wait()  # so that few lines are in memory
        except* GaveUpError as gave_up:
            raise gave_up.exceptions[0] from None
        self._pacer.check_integrity()

    async def _finish(self, line: InputLine, has_place: asyncio.Event) -> None:
        """Send one request until its line is written."""
        num_broken = 0
        for attempt in itertools.count():
            async with self._pacer.place(is_again=attempt > 0) as sent_at_s:
                has_place.set()
                answer, fault = await self._send(line)
            if answer is not None and answer.is_refusal:
                self.num_refusals += 1
                self._pacer.refused(sent_at_s, answer.retry_after_s)
                if answer.is_alive:
                    self._heard_at_s = self._now()
                self._check_patience(f"status {answer.status}")
                continue
            if answer is None:
                self._pacer.refused(sent_at_s, None)
                self._check_patience(fault)
            elif not answer.is_broken:
                break
            num_broken += 1
            if num_broken == MAX_ATTEMPTS:
                break
            await asyncio.sleep(PAUSE_S * 2.0 ** (num_broken - 1))
        self._end(line, answer, fault)

    def _end(self, line: InputLine, answer: Answer | None, fault: str) -> None:
        if answer is None:
            self._fail(line, "no_answer", fault)
            return
        self._pacer.answered()
        self._heard_at_s = self._now()
        self._write(line, {"response": _response(answer), "error": None})

    async def _send(self, line: InputLine) -> tuple[Answer | None, str]:
        try:
            return await self._sender.send(line), ""
        except ConnectionError as error:
            return None, str(error)

    def _check_patience(self, why: object) -> None:
        if self._now() - self._heard_at_s > self._patience_s:
            raise GaveUpError(f"nothing was answered for {self._patience_s:g} s, last: {why}")

    def _fail(self, line: InputLine, code: str, message: str) -> None:
        self._write(line, {"response": None, "error": {"code": code, "message": message}})

    def _write(self, line: InputLine, outcome: dict[str, Any]) -> None:
        own_id = f"batch_req_{uuid.uuid4().hex}"
        self._output.append({"id": own_id, "custom_id": line.custom_id, **outcome})
        self._told()


def _response(answer: Answer) -> dict[str, Any]:
    return {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
