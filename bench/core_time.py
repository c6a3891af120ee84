"""What processes do with the cores meanwhile, from Linux: run, wait for one, sleep."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Of all threads of some processes, since each began."""

    run_s: float = 0.0
    wait_s: float = 0.0  # ready to run, but another one had the core
    num_sleeps: int = 0  # times that a thread gave its core away to wait for something

    @classmethod
    def of(cls, pids: Iterable[int]) -> Self:
        """Sum it up; a thread that ends meanwhile takes its share with it."""
        run_ns = wait_ns = num_sleeps = 0
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    run, wait, _ = (task / "schedstat").read_text().split()
                    status = (task / "status").read_text()
                except OSError:
                    continue
                run_ns += int(run)
                wait_ns += int(wait)
                num_sleeps += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        return cls(run_ns / 1e9, wait_ns / 1e9, num_sleeps)

    def since(self, earlier: "CoreTime") -> "CoreTime":
        """What came after an earlier look."""
        return CoreTime(
            self.run_s - earlier.run_s,
            self.wait_s - earlier.wait_s,
            self.num_sleeps - earlier.num_sleeps,
        )

    def for_each(self, num_tokens: int) -> str:
        """As a line."""
        run_ms, wait_ms = 1e3 * self.run_s / num_tokens, 1e3 * self.wait_s / num_tokens
        num_sleeps = self.num_sleeps / num_tokens
        return f"a token: runs {run_ms:.2f} ms, waits {wait_ms:.2f}, sleeps {num_sleeps:.1f} times"


class CoreWatch:
    """Remembers what each group of processes did during the last call."""

    def __init__(self, groups: Mapping[str, Iterable[int]]) -> None:
        self._groups = groups
        self._last: dict[str, CoreTime] = {}

    def call(self, verb: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Watch one call."""
        before = {name: CoreTime.of(pids) for name, pids in self._groups.items()}
        result = verb(*arguments, **keywords)
        self._last = {
            name: CoreTime.of(pids).since(before[name]) for name, pids in self._groups.items()
        }
        return result

    def lines(self, num_tokens: int) -> Iterator[str]:
        """A line for each group."""
        for name, last in self._last.items():
            yield f"{name:16} {last.for_each(num_tokens)}"
