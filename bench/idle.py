"""What an idle worker costs, beside an empty replica of Serve in the same Ray and the same seconds.

    .venv/bin/python -m bench.idle [--seconds 20] [--model PATH]

Starts `relevo serve`, deploys an empty replica into its Ray, waits until all is quiet, and reads
the processor time of each process before and after, from Linux, to the nanosecond. A worker may
cost 0.5 % of a core more.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from bench.overhead import served
from router.poller import SETTLED_AFTER_S

LIMIT_PERCENT = 0.5
LEAST_PAUSE_S = 1.0
JOIN_WITHIN_S = 90.0
EMPTY = "empty replica"


@contextmanager
def empty_replica(of: psutil.Process) -> Iterator[int]:
    """A replica that does nothing, in the Ray of `relevo serve` (`of`); its process id."""
    raylet = next(each for each in of.children(recursive=True) if each.name() == "raylet")
    (address,) = (
        each.partition("=")[2] for each in raylet.cmdline() if each.startswith("--gcs-address=")
    )
    ours = {name: text for name, text in raylet.environ().items() if name.startswith("RAY_AUTH")}
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.empty_replica", address],
        env={**os.environ, **ours},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # Whatever Ray may say comes before it.
        line = next(line for line in process.stdout if line.startswith("{"))
        yield int(json.loads(line)["pid"])
    finally:
        process.stdin.close()
        process.wait(JOIN_WITHIN_S)


def idle_percent(pids: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Percent of a core that each process took meanwhile."""
    before = {name: _threads_ns(pid) for name, pid in pids.items()}
    started_s = time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - started_s
    return {
        name: sum(ns - before[name].get(thread, 0) for thread, ns in _threads_ns(pid).items())
        / (1e7 * took_s)
        for name, pid in pids.items()
    }


def _threads_ns(pid: int) -> dict[str, int]:
    """What each thread has run: a process's times come in ticks, a tenth of a percent of 10 s."""
    return {
        path.parent.name: int(path.read_text().split()[0])
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    }


def workers_beside_empty(
    url: str, of: psutil.Process, seconds: float, *, settle_s: float = 0.0
) -> dict[str, float]:
    """Percent of a core of each worker, and of an empty replica beside them, from `settle_s` on."""
    begin_s = time.monotonic() + settle_s
    workers = httpx.get(f"{url}/v1/status", timeout=10).json()["workers"]
    with empty_replica(of) as pid:
        time.sleep(max(LEAST_PAUSE_S, begin_s - time.monotonic()))
        return idle_percent({EMPTY: pid, **{each["id"]: each["pid"] for each in workers}}, seconds)


def main() -> None:
    """Print one line for each process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--model", type=Path, default=Path(".models/smollm2-135m-instruct"))
    parser.add_argument("--port", type=int, default=18_600)
    options = parser.parse_args()
    with served(options.model, "auto", 1, options.port) as url:
        (serve,) = (
            each
            for each in psutil.Process().children()
            if any(part.endswith("relevo") for part in each.cmdline())
        )
        percent = workers_beside_empty(
            url, serve, options.seconds, settle_s=SETTLED_AFTER_S + LEAST_PAUSE_S
        )
    for name, own in percent.items():
        more = own - percent[EMPTY]
        verdict = "" if name == EMPTY else f"{more:+.2f} (limit {LIMIT_PERCENT})"
        print(f"{name:14} {own:6.2f} % of a core {verdict}")


if __name__ == "__main__":
    main()
