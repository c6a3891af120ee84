"""Runs one worker as a plain process: says on stdout that it serves, drains on SIGTERM."""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn, Protocol

from kv_transfer.place import Place
from rpc.description import WorkerDescription, process_incarnation
from rpc.start_clock import StartClock
from telemetry.logs import set_up_logging
from workers.config import WorkerConfig
from workers.kind import WorkerKind

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S = 1.0
MAX_FAILED_CHECKS = 3  # in a row; a single one may be a hiccup of the machine


class RunnableWorker(Protocol):
    """What this module needs of a worker."""

    async def start(self, clock: StartClock | None) -> WorkerDescription:
        """Serve, and say where; the clock has run since the process began to start."""

    async def drain(self, drain_s: float) -> None:
        """Let what runs come to its end."""

    async def stop(self) -> None:
        """End everything."""

    def check_health(self) -> None:
        """Raise when the engine will not recover."""


def main(kind: WorkerKind, argv: list[str]) -> NoReturn:
    """Serve until SIGTERM, then end the process."""
    status = run(kind, argv)
    logging.shutdown()
    # Everything was stopped; a thread that a driver still holds must not keep the process.
    os._exit(status)


def run(kind: WorkerKind, argv: list[str]) -> int:
    """Serve until SIGTERM; the exit status."""
    clock = StartClock()
    arguments = _parse_arguments(f"python -m {kind.module.partition('.')[0]}", argv)
    set_up_logging()
    try:
        config = WorkerConfig.from_dict(_read_config(arguments))
    except (OSError, ValueError) as error:
        logger.error("cannot read %s: %s", arguments.config, error)
        return 2
    worker_class = kind.import_class(config)
    clock.lap("imports")
    worker: RunnableWorker = worker_class(
        config,
        worker_id=f"{kind.pool}-{arguments.rank}",
        incarnation=process_incarnation(),
        place=Place(arguments.node_id),
    )
    return asyncio.run(serve_until_signalled(worker, drain_s=config.drain_s, clock=clock))


def _parse_arguments(program: str, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of the worker's keys")
    parser.add_argument("--rank", type=int, default=0, help="place of this worker in its pool")
    parser.add_argument("--port", type=int, help="gRPC port; any free one by default")
    parser.add_argument("--node-id", default="", help="machine this worker runs on")
    return parser.parse_args(argv)


def _read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(arguments.config.read_text())
    if arguments.port is not None:
        data["rpc"] = {**data.get("rpc", {}), "port_range": f"{arguments.port}-{arguments.port}"}
    return data


async def serve_until_signalled(
    worker: RunnableWorker, *, drain_s: float, clock: StartClock | None = None
) -> int:
    """Run `worker` until SIGTERM or SIGINT, or until its engine gives up; the exit status."""
    terminate, force = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (force if terminate.is_set() else terminate).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        description = await worker.start(clock)
        sys.stdout.write(json.dumps(description.to_dict()) + "\n")
        sys.stdout.flush()
        if not await _is_healthy_until(terminate, worker):
            return 1
        draining = asyncio.ensure_future(worker.drain(drain_s))
        forced = asyncio.ensure_future(force.wait())
        await asyncio.wait({draining, forced}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, forced):
            task.cancel()
        await asyncio.gather(draining, forced, return_exceptions=True)
        return 0
    finally:
        await worker.stop()


async def _is_healthy_until(terminate: asyncio.Event, worker: RunnableWorker) -> bool:
    num_failed_checks = 0
    while not terminate.is_set():
        try:
            worker.check_health()
            num_failed_checks = 0
        except RuntimeError as error:
            num_failed_checks += 1
            logger.warning("health check %d failed: %s", num_failed_checks, error)
            if num_failed_checks >= MAX_FAILED_CHECKS:
                return False
        try:
            async with asyncio.timeout(HEALTH_PERIOD_S):
                await terminate.wait()
        except TimeoutError:
            continue
    return True
