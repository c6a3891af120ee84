"""Compiled grammars of one worker: each is made once, and those used last are kept."""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from grammar.compiler import CompiledGrammar, GrammarCompiler
from grammar.grammar import Grammar
from grammar.stack import deep_executor
from grammar.vocabulary import Vocabulary, load_vocabulary

MAX_GRAMMARS = 128
MAX_TEXT_BYTES = 4 * 1024 * 1024  # of all that are kept
# Of all that are kept, to compile them: some 30 MiB a second, whatever their text is.
MAX_KEPT_COMPILE_S = 8.0


class GrammarLibrary:
    """Owns the compiler, its thread and what it made, all from the first grammar on.

    Belongs to one event loop. Invariant: what is kept stays within all bounds, except that the one
    used last is always kept.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._executor: ThreadPoolExecutor | None = None
        self._compiler: GrammarCompiler | None = None  # the thread's own
        self._kept: OrderedDict[Grammar, asyncio.Future[CompiledGrammar]] = OrderedDict()
        self._text_bytes = 0

    @classmethod
    def of_checkpoint(
        cls, path: str, *, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> "GrammarLibrary":
        """For the model in a directory, which is read when the first grammar comes."""
        load = functools.partial(
            load_vocabulary, path, vocab_size=vocab_size, eos_token_ids=eos_token_ids
        )
        return cls(load)

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, grammar: Grammar) -> CompiledGrammar:
        """Return it compiled; GrammarError when that cannot be done. Never blocks the loop."""
        future = self._kept.get(grammar)
        if future is None:
            if self._executor is None:
                self._executor = deep_executor("grammar")
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._executor, self._compile, grammar)
            self._keep(grammar, future)
        self._kept.move_to_end(grammar)
        try:
            # One that gives up does not take it from the others that wait.
            compiled = await asyncio.shield(future)
        except Exception:
            # Not kept, whatever it was: a file that cannot be read now may be there next time.
            self._forget(grammar, future)
            raise
        self._evict()
        return compiled

    def close(self) -> None:
        """End the thread after what it does now."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._load())
        return self._compiler.compile(grammar)

    def _keep(self, grammar: Grammar, future: asyncio.Future[CompiledGrammar]) -> None:
        # A failure that nobody waits for any more is no news.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._kept[grammar] = future
        self._text_bytes += len(grammar.text)
        self._evict()

    def _evict(self) -> None:
        while len(self._kept) > 1 and (
            len(self._kept) > MAX_GRAMMARS
            or self._text_bytes > MAX_TEXT_BYTES
            or self._compile_s() > MAX_KEPT_COMPILE_S
        ):
            oldest, _ = self._kept.popitem(last=False)
            self._text_bytes -= len(oldest.text)

    def _compile_s(self) -> float:
        made = [future for future in self._kept.values() if future.done()]
        return sum(future.result().compile_s for future in made if _has_result(future))

    def _forget(self, grammar: Grammar, future: asyncio.Future[CompiledGrammar]) -> None:
        if self._kept.get(grammar) is future:
            del self._kept[grammar]
            self._text_bytes -= len(grammar.text)


def _has_result(future: "asyncio.Future[CompiledGrammar]") -> bool:
    return not future.cancelled() and future.exception() is None
