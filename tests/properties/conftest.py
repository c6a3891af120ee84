"""One small cluster inside this process, for all properties that a client can see.

A prefill and a decode worker with tiny engines in float64, joined by a link, and two ingresses
in front: one always hands over, one knows the decode worker alone. Tests are plain functions, so
the cluster has a thread with its own event loop.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from api.ingress import Ingress
from router.config import RouterConfig
from tests.cluster_processes import PATIENT
from tests.properties.client import Client
from tests.relay import open_ingress
from tests.tiny_model import make_tiny_model
from tests.worker_pair import worker_pair

# A pool that is often full, and steps that cut a prompt of a few dozen tokens into pieces.
ENGINE = {"num_kv_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Clients of the two ingresses."""

    handed_over: Client  # every prompt is computed by the prefill worker
    alone: Client  # the decode worker does everything

    @property
    def both(self) -> tuple[Client, Client]:
        """The two ways a request can be served."""
        return (self.handed_over, self.alone)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="package")
def cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start it all; at the end every pool's books must agree."""
    folder = tmp_path_factory.mktemp("cluster")
    started: list[tuple[Ingress, Ingress]] = []
    is_up, is_over = threading.Event(), asyncio.Event()
    failures: list[BaseException] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with open_ingresses(folder, model_path) as ingresses:
            started.append(ingresses)
            is_up.set()
            await is_over.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)
        finally:
            is_up.set()

    thread = threading.Thread(target=run, name="cluster")
    thread.start()
    assert is_up.wait(60.0)
    try:
        if started:
            clients = [Client(each.http_port, each.grpc_port) for each in started[0]]
            yield Cluster(handed_over=clients[0], alone=clients[1])
            for client in clients:
                client.close()
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(30.0)
        loop.close()
    if failures:
        raise failures[0]


@asynccontextmanager
async def open_ingresses(folder: Path, model_path: Path) -> AsyncIterator[tuple[Ingress, Ingress]]:
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(
            worker_pair(folder, model_path, both={"engine": ENGINE, "kv_transfer": PATIENT})
        )
        workers = [worker.describe() for worker in (*pair.prefill, *pair.decode)]
        made = [
            await stack.enter_async_context(
                open_ingress(
                    known,
                    config,
                    model_path=model_path,
                    token_file=folder / "token",
                    ingress_id=config.local_prefill,
                )
            )
            for known, config in (
                (workers, RouterConfig(local_prefill="never")),
                (workers[1:], RouterConfig()),
            )
        ]
        for ingress in made:
            await until_ready(ingress)
        yield made[0], made[1]


async def until_ready(ingress: Ingress) -> None:
    for _ in range(1000):
        if ingress.serving.is_ready():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the ingress has no workers")
