"""`python -m prefill_workers --config FILE.json --rank N`: one prefill worker without Ray."""

import asyncio
import logging
import os
import sys

from kv_transfer import nccl_settings
from kv_transfer.place import Place
from prefill_workers.config import PrefillWorkerConfig
from rpc import worker_process
from rpc.description import process_incarnation
from rpc.start_clock import StartClock
from rpc.start_imports import import_whole
from telemetry.logs import set_up_logging

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Serve until SIGTERM; the exit status."""
    clock = StartClock()
    arguments = worker_process.parse_arguments("python -m prefill_workers", argv)
    set_up_logging()
    try:
        config = PrefillWorkerConfig.from_dict(worker_process.read_config(arguments))
    except (OSError, ValueError) as error:
        logger.error("cannot read %s: %s", arguments.config, error)
        return 2
    nccl_settings.apply(config.kv_transfer, os.environ)
    if config.engine.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.engine.num_threads)
    # torch reads both when it is imported, and the worker imports it: hence only now.
    worker_class = import_whole("prefill_workers.worker").PrefillWorker
    clock.lap("imports")
    worker = worker_class(
        config,
        worker_id=f"prefill-{arguments.rank}",
        incarnation=process_incarnation(),
        place=Place(arguments.node_id),
    )
    return asyncio.run(
        worker_process.serve_until_signalled(worker, drain_s=config.drain_s, clock=clock)
    )


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    # Everything was stopped; a thread that a driver still holds must not keep the process.
    os._exit(status)
