"""Asks Serve which workers exist: a broadcast to every replica of the worker deployments."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from rpc.description import WorkerDescription

ANSWER_WITHIN_S = 2.0  # a frozen replica costs this much, and only its own answer

_log = logging.getLogger(__name__)


class ServeDiscovery:
    """Implements the router's Discovery over deployment handles. No request waits for it."""

    def __init__(self, handles: Sequence[DeploymentHandle[Any]]) -> None:
        self._handles = list(handles)

    async def describe(self) -> Sequence[WorkerDescription]:
        """Describe each worker that answered."""
        pools = await asyncio.gather(
            *(asyncio.to_thread(_ask_all, handle) for handle in self._handles)
        )
        return [worker for pool in pools for worker in pool]


def _ask_all(handle: DeploymentHandle[Any]) -> list[WorkerDescription]:
    # The blocking form, in a thread: it keeps the other answers when one replica stays silent.
    try:
        answers = handle.broadcast("describe").results(
            timeout_s=ANSWER_WITHIN_S, return_exceptions=True
        )
    except (TimeoutError, DeploymentUnavailableError) as error:
        _log.info("no replica of %s answered: %r", handle.deployment_name, error)
        return []
    return [WorkerDescription.from_dict(answer) for answer in answers if isinstance(answer, dict)]
