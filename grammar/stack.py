"""A thread on which deep grammars can be compiled."""

import threading
from concurrent.futures import ThreadPoolExecutor

# The library descends once for every rule that leads to the next. A chain of rules that fills
# MAX_GRAMMAR_BYTES needs about 60 MiB; the rest of this is never touched, so it costs no memory.
_STACK_BYTES = 256 * 1024 * 1024


def deep_executor(name: str) -> ThreadPoolExecutor:
    """Return an executor whose one thread runs already, on a stack of its own size."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    usual = threading.stack_size(_STACK_BYTES)
    try:
        executor.submit(_start).result()
    finally:
        threading.stack_size(usual)
    return executor


def _start() -> None:
    """What makes the executor start its thread."""
