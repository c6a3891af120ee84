"""The process that judges grammars, and what happens when one ends it."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from grammar import checker
from grammar.checker import Answer, CheckerBusyError, CheckerDiedError, GrammarChecker
from grammar.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarError, GrammarKind
from tests.tiny_tokenizer import byte_fallback_backend, write_tokenizer

# Its automaton has millions of states.
ENDLESS = Grammar(
    kind=GrammarKind.JSON_SCHEMA,
    text=json.dumps({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 997}]}),
)


def pattern(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def grammar_checker(model_path: Path) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(str(model_path))
    yield made
    await made.close()


def pid_of(made: GrammarChecker) -> int | None:
    return made._process.pid if made._process is not None else None


async def test_verdicts_are_right_and_kept(grammar_checker: GrammarChecker) -> None:
    assert pid_of(grammar_checker) is None  # nothing before the first question
    await grammar_checker.check(pattern("a+"))
    pid = pid_of(grammar_checker)
    for _ in range(2):
        with pytest.raises(GrammarError, match="regex"):
            await grammar_checker.check(pattern("(("))
    await asyncio.gather(*(grammar_checker.check(pattern("a+")) for _ in range(100)))
    assert pid_of(grammar_checker) == pid


async def test_what_takes_too_long_is_refused_and_others_are_served(model_path: Path) -> None:
    made = GrammarChecker(str(model_path), limit_s=0.4)
    await made.check(pattern("a+"))
    pid = pid_of(made)
    with pytest.raises(GrammarError, match=r"takes more than 0\.4 s"):
        await made.check(ENDLESS)
    assert pid_of(made) is None
    with pytest.raises(GrammarError, match="takes more than"):
        await made.check(ENDLESS)
    assert pid_of(made) is None  # remembered
    await made.check(pattern("b+"))
    assert pid_of(made) not in {None, pid}
    await made.close()


async def test_each_that_takes_too_long_hears_so(model_path: Path) -> None:
    """Also when the process has ended before anybody looks: its status must not get lost."""
    made = GrammarChecker(str(model_path), limit_s=0.1)
    for number in range(8):
        schema = {"allOf": [{"type": "integer", "multipleOf": 9973 + number}, {"multipleOf": 997}]}
        endless = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
        with pytest.raises(GrammarError, match=r"takes more than 0\.1 s"):
            await made.check(endless)
    await made.close()


@pytest.mark.parametrize("end", [signal.SIGSEGV, signal.SIGKILL])
async def test_a_process_that_dies_costs_nobody_a_verdict(
    grammar_checker: GrammarChecker, end: signal.Signals
) -> None:
    await grammar_checker.check(pattern("a+"))
    process = grammar_checker._process
    assert process is not None
    process.send_signal(end)
    process.wait()
    await grammar_checker.check(pattern("c+"))
    with pytest.raises(GrammarError, match="regex"):
        await grammar_checker.check(pattern("(("))


def test_its_process_is_made_without_what_runs_at_a_fork(model_path: Path) -> None:
    """gRPC's part of it crashed the child of a Ray worker now and then."""
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(os.getpid()))

    async def check() -> None:
        made = GrammarChecker(str(model_path))
        await made.check(pattern("a+"))
        await made.close()

    uvloop.run(check())  # the loop of an ingress
    assert forks == []


async def test_a_process_that_stands_still_is_replaced(model_path: Path) -> None:
    made = GrammarChecker(str(model_path), limit_s=0.3)
    await made.check(pattern("a+"))
    pid = pid_of(made)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(made.check(pattern(f"{name}+"))) for name in "bcd"]
    await asyncio.gather(*waiting)
    assert pid_of(made) not in {None, pid}
    await made.close()


class PoisonedChecker(GrammarChecker):
    """Its process ends over one question, and at its start when it is told to."""

    num_ends = 0
    dies_at_start = False

    async def _ask(self, question: str, *, limit_s: float) -> Answer | None:
        if "poison" in question or (self.dies_at_start and not question):
            assert self._process is not None
            self._process.send_signal(signal.SIGSEGV)
            self.num_ends += 1
        return await super()._ask(question, limit_s=limit_s)


async def test_who_ends_two_processes_is_too_complex(model_path: Path) -> None:
    made = PoisonedChecker(str(model_path))
    for _ in range(2):
        with pytest.raises(GrammarError, match="too complex"):
            await made.check(pattern("poison"))
        assert made.num_ends == 2  # and remembered
    await made.check(pattern("q+"))
    await made.close()


async def test_a_process_that_does_not_come_up_is_no_verdict(model_path: Path) -> None:
    made = PoisonedChecker(str(model_path))
    made.dies_at_start = True
    with pytest.raises(CheckerDiedError):
        await made.check(pattern("a+"))
    made.dies_at_start = False
    await made.check(pattern("a+"))
    await made.close()


async def test_the_longest_chain_of_rules_fits_the_stack(grammar_checker: GrammarChecker) -> None:
    # Each rule leads to the next, in as few bytes as possible.
    number, rules = 0, ["start: a0"]
    size = len(rules[0])
    while size < MAX_GRAMMAR_BYTES - 40:
        rules.append(f"a{number:x}:a{number + 1:x}")
        size += len(rules[-1]) + 1
        number += 1
    rules.append(f'a{number:x}:"y"')
    await grammar_checker.check(Grammar(kind=GrammarKind.CFG, text="\n".join(rules)))


async def test_too_many_that_wait_are_sent_away(
    grammar_checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "MAX_WAITING", 2)
    waiting = [asyncio.create_task(grammar_checker.check(pattern(f"a{n}"))) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(CheckerBusyError) as caught:
        await grammar_checker.check(pattern("b"))
    assert caught.value.retry_after_s > 0
    await asyncio.gather(*waiting)
    await grammar_checker.check(pattern("b"))


async def test_a_client_that_leaves_disturbs_nobody(grammar_checker: GrammarChecker) -> None:
    await grammar_checker.check(pattern("a"))
    pid = pid_of(grammar_checker)
    leaving = asyncio.create_task(grammar_checker.check(pattern("b")))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(GrammarError):
        await grammar_checker.check(pattern("(("))
    await grammar_checker.check(pattern("c"))
    assert pid_of(grammar_checker) == pid


async def test_a_model_without_an_end_of_text_serves_none(tmp_path: Path) -> None:
    byte_fallback_backend().save(str(tmp_path / "tokenizer.json"))
    made = GrammarChecker(str(tmp_path))
    with pytest.raises(GrammarError, match=r"no grammar is served.*end-of-sequence"):
        await made.check(pattern("a"))
    assert pid_of(made) is None
    await made.close()
