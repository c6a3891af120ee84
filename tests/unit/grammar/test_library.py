"""Each grammar is compiled once, off the loop, and not too many are kept."""

import asyncio
import threading
import time

import pytest

from grammar import library
from grammar.grammar import Grammar, GrammarError, GrammarKind
from grammar.library import GrammarLibrary
from grammar.vocabulary import Vocabulary


class Loads:
    """Counts how often the vocabulary is read, and on which thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.threads: list[str] = []
        self._vocabulary = vocabulary

    def __call__(self) -> Vocabulary:
        self.threads.append(threading.current_thread().name)
        return self._vocabulary


@pytest.fixture
def loads(vocabulary: Vocabulary) -> Loads:
    return Loads(vocabulary)


def pattern(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


async def test_equal_grammars_are_compiled_once_and_nothing_before_the_first(loads: Loads) -> None:
    grammars = GrammarLibrary(loads)
    assert loads.threads == []
    made = await asyncio.gather(*(grammars.get(pattern("a+")) for _ in range(5)))
    assert len({id(each) for each in made}) == 1
    assert await grammars.get(pattern("a+")) is made[0]
    assert await grammars.get(pattern("b+")) is not made[0]
    assert len(loads.threads) == 1
    assert loads.threads[0].startswith("grammar")
    grammars.close()


async def test_a_bad_grammar_fails_those_who_ask_and_is_not_kept(loads: Loads) -> None:
    grammars = GrammarLibrary(loads)
    answers = await asyncio.gather(
        *(grammars.get(pattern("((")) for _ in range(3)),
        grammars.get(pattern("a")),
        return_exceptions=True,
    )
    assert [type(each) for each in answers[:3]] == [GrammarError] * 3
    assert not isinstance(answers[3], Exception)
    assert len(grammars) == 1
    grammars.close()


async def test_a_vocabulary_that_cannot_be_read_once_can_be_the_next_time(loads: Loads) -> None:
    failures = [OSError("gone for a moment")]

    def load() -> Vocabulary:
        if failures:
            raise failures.pop()
        return loads()

    grammars = GrammarLibrary(load)
    with pytest.raises(OSError, match="gone"):
        await grammars.get(pattern("a"))
    assert await grammars.get(pattern("a"))
    grammars.close()


async def test_what_was_used_last_is_kept(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MAX_GRAMMARS", 3)
    grammars = GrammarLibrary(loads)
    first = await grammars.get(pattern("a0"))
    for number in range(1, 6):
        await grammars.get(pattern(f"a{number}"))
        assert await grammars.get(pattern("a0")) is first
        assert len(grammars) <= 3
    grammars.close()


async def test_large_texts_leave_fewer_kept(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MAX_TEXT_BYTES", 100)
    grammars = GrammarLibrary(loads)
    for number in range(4):
        await grammars.get(pattern(f"{number}" * 40))
    assert len(grammars) == 2
    await grammars.get(pattern("x" * 200))
    assert len(grammars) == 1
    grammars.close()


async def test_what_took_long_to_compile_leaves_fewer_kept(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarLibrary(loads)
    await asyncio.gather(
        *(grammars.get(pattern(f"a{number}")) for number in range(5)),
        grammars.get(pattern("((")),
        return_exceptions=True,
    )
    assert len(grammars) == 5
    last = await grammars.get(pattern("a4"))
    assert last.compile_s > 0.0
    monkeypatch.setattr(library, "MAX_KEPT_COMPILE_S", last.compile_s)
    assert await grammars.get(pattern("a4")) is last
    assert len(grammars) == 1
    grammars.close()


async def test_who_gives_up_does_not_take_it_from_the_others(loads: Loads) -> None:
    grammars = GrammarLibrary(loads)
    leaving = asyncio.create_task(grammars.get(pattern("a+")))
    staying = asyncio.create_task(grammars.get(pattern("a+")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).new_mask().num_tokens == 0
    assert leaving.cancelled()
    grammars.close()


async def test_the_loop_goes_on_while_a_grammar_is_compiled(loads: Loads) -> None:
    grammars = GrammarLibrary(loads)
    await grammars.get(pattern("a"))
    # Its automaton has as many states as its number says: that is time inside the library.
    slow = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "integer", "multipleOf": 30011}')
    started_s = time.thread_time()
    compiling = asyncio.create_task(grammars.get(slow))
    num_turns = 0
    while not compiling.done():
        await asyncio.sleep(0)
        num_turns += 1
    await compiling
    # A loop that had to wait for the compiler would have had a few turns, and no time of its own.
    assert num_turns > 100
    assert time.thread_time() - started_s > 0.02
    grammars.close()
