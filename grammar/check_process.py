"""`python -m grammar.check_process`: compiles what strangers send, and may die of it.

First one line out, {"error": null} when it is ready. Then one line in for each grammar,
{"kind": ..., "text": ...}, and one out, {"error": ... or null}. The kernel ends the process when a
grammar takes too much time or memory; its parent starts another.
"""

import argparse
import json
import os
import resource
import signal
import sys

from grammar.compiler import GrammarCompiler
from grammar.grammar import Grammar, GrammarError, GrammarKind
from grammar.stack import deep_executor
from grammar.trial import try_out
from grammar.vocabulary import Vocabulary, load_vocabulary

# Above what the process has when it is ready. The workers keep what was compiled, so this is small.
_MEMORY_LIMIT_BYTES = 512 * 1024**2
_NICENESS = 10  # nobody's tokens wait for a verdict


def main(argv: list[str]) -> int:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m grammar.check_process", allow_abbrev=False)
    parser.add_argument("--path", required=True, help="the model's directory")
    parser.add_argument("--limit-s", type=float, required=True, help="time of one grammar")
    arguments = parser.parse_args(argv)
    # It ends with its parent, which closes its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    try:
        vocabulary = load_vocabulary(arguments.path)
        compiler = GrammarCompiler(vocabulary)
    except (OSError, ValueError) as error:
        _answer(str(error))
        return 2
    executor = deep_executor("grammar")
    _limit_memory()
    _answer(None)
    for line in sys.stdin:
        question = json.loads(line)
        # Counts the time of all threads and ends the process, whatever the library is in.
        signal.setitimer(signal.ITIMER_PROF, arguments.limit_s)
        reason = executor.submit(_check, compiler, vocabulary, question).result()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(reason)
    return 0


def _answer(error: str | None) -> None:
    sys.stdout.write(json.dumps({"error": error}) + "\n")
    sys.stdout.flush()


def _check(
    compiler: GrammarCompiler, vocabulary: Vocabulary, question: dict[str, str]
) -> str | None:
    grammar = Grammar(kind=GrammarKind(question["kind"]), text=question["text"])
    try:
        try_out(compiler.compile(grammar), vocabulary.eos_token_ids)
    except GrammarError as error:
        return str(error)
    return None


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    limit = used_bytes + _MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
