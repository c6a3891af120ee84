"""From the decision to start one more worker until it served its first token, part by part.

    .venv/bin/python -m bench.cold_start [--model PATH] [--pool decode] [--rounds 3]

A live cluster (`relevo serve`, one worker of each pool) is made to grow by one worker of a pool:
its autoscaling is on, and streams keep it busier than is meant. The parts:

    controller   the ingress wishes for it -> Serve has started its process (the rest of the whole)
    imports ... server   what the worker itself measured (`rpc/start_clock.py`)
    discovery    it serves -> the ingress knows it and says it is ready
    link         -> its first KV link was built and probed
    routed       -> it has a request
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

RELEVO = Path(sys.executable).with_name("relevo")
POLL_S = 0.05
READY_WITHIN_S = 300.0
DOWN_DELAY_S = 5.0
STREAM_TOKENS = 64


@contextmanager
def served(model: str, pool: str, port: int) -> Iterator[str]:
    """A cluster whose pool grows from one worker to two as soon as anything runs."""
    share = "seqs_share" if pool == "decode" else "busy_share"
    keys = [
        f"{pool}.autoscaling.max=2",
        f"{pool}.autoscaling.{share}=0.01",
        f"{pool}.autoscaling.up_delay_s=0",
        f"{pool}.autoscaling.down_delay_s={DOWN_DELAY_S}",
        f"{pool}.drain_s=6",
        f"ingress.http_port={port}",
        f"ingress.grpc_port={port + 1}",
        "router.local_prefill=never",
        *([f"model.path={model}"] if model else []),
    ]
    command = [str(RELEVO), "serve", *(part for key in keys for part in ("--set", key))]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def status(url: str) -> dict[str, Any]:
    """What the ingress knows; empty while it does not answer."""
    try:
        body: dict[str, Any] = httpx.get(f"{url}/v1/status", timeout=5).json()
    except httpx.HTTPError:
        return {"workers": [], "state": "starting"}
    return body


def wait(url: str, is_so: Callable[[dict[str, Any]], bool]) -> tuple[float, dict[str, Any]]:
    """When it came to be, on the monotonic clock, and the status then."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        found = status(url)
        if is_so(found):
            return time.monotonic(), found
        time.sleep(POLL_S)
    raise TimeoutError(f"it did not come: {found}")


class Load:
    """Streams, one after the other on each of some threads."""

    def __init__(self, url: str, number: int) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._stream) for _ in range(number)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _stream(self) -> None:
        model = httpx.get(f"{self._url}/v1/models", timeout=10).json()["data"][0]["id"]
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": STREAM_TOKENS}
        while not self._is_over.is_set():
            httpx.post(
                f"{self._url}/v1/completions", json=body | {"ignore_eos": True}, timeout=300
            ).raise_for_status()


def new_worker(found: dict[str, Any], pool: str, known: set[str]) -> dict[str, Any]:
    """The one that came last, if it is there."""
    fresh = [each for each in found["workers"] if each["pool"] == pool and each["id"] not in known]
    return next((each for each in fresh if each["state"] == "ready"), {})


def measure(url: str, pool: str) -> dict[str, float]:
    """Seconds of each part of one start."""
    known = {each["id"] for each in status(url)["workers"]}
    with Load(url, 3):
        decided_s, _ = wait(url, lambda found: found["scaling"][pool]["target"] == 2)
        ready_s, found = wait(url, lambda found: bool(new_worker(found, pool, known)))
        worker = new_worker(found, pool, known)
        linked_s, _ = wait(
            url,
            lambda found: any(
                link["state"] == "ready" for link in new_worker(found, pool, known).get("links", ())
            ),
        )
        routed_s, _ = wait(
            url,
            lambda found: bool(
                new_worker(found, pool, known).get("running")
                or new_worker(found, pool, known).get("transferring")
            ),
        )
    own_s = dict(worker["start_s"])
    parts = {
        "controller": ready_s - decided_s - sum(own_s.values()),
        **own_s,
        "link": linked_s - ready_s,
        "routed": routed_s - linked_s,
    }
    wait(url, lambda found: sum(each["pool"] == pool for each in found["workers"]) == 1)
    return parts


def main() -> None:
    """Measure some starts and print the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="the demo model unless given")
    parser.add_argument("--pool", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18_400)
    arguments = parser.parse_args()
    rounds = []
    began_s = time.monotonic()
    with served(arguments.model, arguments.pool, arguments.port) as url:
        ready_s, found = wait(url, lambda found: found["state"] == "ready")
        print(f"relevo serve to ready: {ready_s - began_s:.1f} s")
        for worker in found["workers"]:
            print(f"  {worker['id']}: {json.dumps(worker['start_s'])}")
        for _ in range(arguments.rounds):
            rounds.append(measure(url, arguments.pool))
            print(json.dumps({name: round(seconds, 2) for name, seconds in rounds[-1].items()}))
    print(f"one more {arguments.pool} worker, medians of {len(rounds)}:")
    for name in rounds[0]:
        print(f"  {name:12} {statistics.median(each[name] for each in rounds):6.2f} s")
    print(f"  {'in all':12} {statistics.median(sum(each.values()) for each in rounds):6.2f} s")


if __name__ == "__main__":
    main()
