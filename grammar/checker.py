"""The verdict on a stranger's grammar, given in a process that may die of it.

The process is made by `subprocess`, not by the loop: uvloop forks, and what gRPC does in the child
of a Ray worker can crash it, or leave it an alarm that ends it seconds later. CPython's own way
runs nothing there. A thread talks to the process, so the loop goes on.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE, Popen, TimeoutExpired

from grammar.grammar import MAX_COMPILE_S, MAX_GRAMMAR_BYTES, Grammar, GrammarError

logger = logging.getLogger(__name__)

Answer = dict[str, str | None]

MAX_VERDICTS = 256
MAX_WAITING = 16
_START_LIMIT_S = 60.0  # a busy machine reads a large vocabulary
_END_LIMIT_S = 5.0  # from the end of its output to its own
_WALL_LIMIT_FACTOR = 5  # of processor time, which a busy machine stretches
# JSON writes one byte as up to six.
_LINE_LIMIT_BYTES = 8 * MAX_GRAMMAR_BYTES


class CheckerDiedError(Exception):
    """No fault of any grammar: the process does not come up."""


class CheckerBusyError(Exception):
    """Too many grammars wait for their verdict; come back after `retry_after_s`."""

    def __init__(self) -> None:
        super().__init__(f"{MAX_WAITING} grammars wait to be compiled")
        self.retry_after_s = MAX_COMPILE_S


class GrammarChecker:
    """Owns the process, from the first question on, and the last verdicts.

    Belongs to one event loop. Invariant: one question is with the process at a time, and it is
    answered or the process is over before the next.
    """

    def __init__(self, path: str, *, limit_s: float = MAX_COMPILE_S) -> None:
        self._arguments = ("--path", path, "--limit-s", str(limit_s))
        self._limit_s = limit_s
        self._process: Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-checker")
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[Grammar, asyncio.Task[str | None]] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Return when the workers can compile it; GrammarError says why they cannot."""
        task = self._verdicts.get(grammar)
        if task is None:
            if sum(not each.done() for each in self._verdicts.values()) >= MAX_WAITING:
                raise CheckerBusyError
            task = self._keep(grammar, asyncio.create_task(self._judge(grammar)))
        self._verdicts.move_to_end(grammar)
        # Who leaves does not stop it: the answer would be taken for that to the next question.
        reason = await asyncio.shield(task)
        if reason is not None:
            raise GrammarError(reason)

    async def close(self) -> None:
        """End the process; those that still wait are cancelled."""
        for task in self._verdicts.values():
            task.cancel()
        await asyncio.gather(*self._verdicts.values(), return_exceptions=True)
        await self._end()
        self._thread.shutdown(wait=False)

    async def _judge(self, grammar: Grammar) -> str | None:
        question = json.dumps({"kind": grammar.kind.value, "text": grammar.text})
        too_slow = f"it takes more than {self._limit_s:g} s to compile; make it simpler"
        status, was_asked = None, False
        async with self._turn:
            # A process may end for reasons of its own, even twice, but not twice over one grammar.
            for _ in range(2):
                answer: Answer | None = {"error": None}
                try:
                    if self._process is None:
                        answer = await self._start()
                    if answer is not None and (reason := answer["error"]) is not None:
                        await self._end()
                        return f"no grammar is served for this model: {reason}"
                    if answer is not None:
                        was_asked = True
                        limit_s = _WALL_LIMIT_FACTOR * self._limit_s
                        answer = await self._ask(question, limit_s=limit_s)
                except BaseException:
                    await self._end()
                    raise
                if answer is not None:
                    return answer["error"]
                status = await self._end(is_over=True)
                logger.warning("the process that judges grammars ended: %s", status)
                if status == -signal.SIGPROF:
                    return too_slow
        if not was_asked:
            raise CheckerDiedError(f"the process that judges grammars ends at its start: {status}")
        if status == -signal.SIGKILL:
            return too_slow
        return "it is too complex to compile; make it smaller or less nested"

    async def _start(self) -> Answer | None:
        """Make the process; what it says when it is ready, None when it came to its end instead."""
        command = [sys.executable, "-m", "grammar.check_process", *self._arguments]
        self._process = await asyncio.to_thread(Popen, command, stdin=PIPE, stdout=PIPE)
        return await self._ask("", limit_s=_START_LIMIT_S)

    async def _ask(self, question: str, *, limit_s: float) -> Answer | None:
        """The next answer; None when the process came to its end instead, or stands still."""
        process = self._process
        assert process is not None
        asked = asyncio.get_running_loop().run_in_executor(
            self._thread, _exchange, process, question
        )
        try:
            async with asyncio.timeout(limit_s):
                line = await asyncio.shield(asked)
        except TimeoutError:
            process.kill()  # which ends the thread's wait
            return None
        answer: Answer | None = json.loads(line) if line.endswith(b"\n") else None
        return answer

    async def _end(self, *, is_over: bool = False) -> int | None:
        """End the process; how it ended, None when there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        if not is_over:
            process.kill()
        return await asyncio.to_thread(_wait_for_end, process)

    def _keep(
        self, grammar: Grammar, task: "asyncio.Task[str | None]"
    ) -> "asyncio.Task[str | None]":
        self._verdicts[grammar] = task
        task.add_done_callback(lambda done: self._settle(grammar, done))
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return task

    def _settle(self, grammar: Grammar, task: "asyncio.Task[str | None]") -> None:
        """Keep verdicts only: what went wrong on our side is tried again."""
        if (task.cancelled() or task.exception()) and self._verdicts.get(grammar) is task:
            del self._verdicts[grammar]


def _exchange(process: Popen[bytes], question: str) -> bytes:
    """Ask, and wait for the answer; nothing when the process is over."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if question:
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
        return process.stdout.readline(_LINE_LIMIT_BYTES)
    except (OSError, ValueError):  # closed on its side, or on ours
        return b""


def _wait_for_end(process: Popen[bytes]) -> int:
    """Take its status; what ends by itself keeps its own."""
    try:
        status = process.wait(_END_LIMIT_S)
    except TimeoutExpired:
        process.kill()
        status = process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # of a question that nobody read
            pipe.close()
    return status
