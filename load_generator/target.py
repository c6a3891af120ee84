"""The server under load: whether it serves the contract's model, and a worker of it to lose."""

import os
import re
from typing import Any

import aiohttp
import psutil

from load_generator.contract import Contract

ANSWER_WITHIN_S = 10.0
SAME_START_S = 2.0  # a clock that is set right moves what the system says of a start


class TargetError(RuntimeError):
    """The server cannot be tested; the message is one line for the person who asked."""


class Target:
    """Asks a server about itself."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key

    async def check(self, contract: Contract) -> None:
        """TargetError unless it serves the contract's model in the contract's revision."""
        models = await self._get("/v1/models")
        ids = [str(each.get("id")) for each in (models or {}).get("data", ())]
        if contract.model not in ids:
            served = ", ".join(ids) or "nothing"
            raise TargetError(f"{self.url} serves {served}, the contract wants {contract.model}")
        if contract.revision:
            told = (await self._get("/version") or {}).get("revision")
            if told != contract.revision:
                raise TargetError(
                    f"{self.url} serves revision {told!r} of {contract.model}, the contract wants "
                    f"{contract.revision!r}"
                )

    async def first_model(self) -> str:
        """The id of the first model it serves."""
        models = await self._get("/v1/models")
        if not models or not models.get("data"):
            raise TargetError(f"{self.url}/v1/models names no model")
        return str(models["data"][0]["id"])

    async def lose_worker(self, pool: str, *, is_allowed: bool) -> str:
        """Kill the busiest worker of a pool if it is ours to kill; what was done, or why not."""
        nobody = f"no {pool} worker was killed"
        if not is_allowed:
            return f"{nobody}: --may-kill was not given"
        try:
            status = await self._get("/v1/status") or {}
        except TargetError as error:
            return f"{nobody}: {error}"
        workers = [
            each
            for each in status.get("workers", ())
            if each.get("pool") == pool and each.get("state") != "lost"
        ]
        if not workers:
            return f"{nobody}: {self.url} tells of none"
        busiest = max(workers, key=lambda each: each.get("running", 0))
        process = _local_process(busiest)
        if process is None:
            return f"{nobody}: {busiest.get('id')} is no process of this user on this machine"
        process.kill()
        return f"{busiest['id']} (pid {process.pid}) was killed"

    async def _get(self, path: str) -> Any:
        """A document, or None where the server has no such route."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
                session.get(self.url + path) as response,
            ):
                if response.status == 404:
                    return None
                if response.status != 200:
                    raise TargetError(f"{self.url}{path} answers {response.status}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise TargetError(f"{self.url}{path} does not answer: {error!r}") from error


def _local_process(worker: dict[str, Any]) -> psutil.Process | None:
    """The process of its pid, if it is ours, runs such a worker, and is no later one.

    Later than the worker's own start is another process with its number. Earlier may be: Ray makes
    workers of processes that wait for work, and a worker counts from when it was made.
    """
    try:
        process = psutil.Process(int(worker["pid"]))
        command = " ".join(process.cmdline())  # of a Serve replica: its deployment
        is_worker = re.search(rf"{worker['pool']}_?workers?\b", command, re.IGNORECASE)
        is_ours = process.uids().real == os.getuid()
        is_later = process.create_time() > float(worker["incarnation"]) / 1e6 + SAME_START_S
    except (psutil.Error, KeyError, TypeError, ValueError):
        return None
    return process if is_worker and is_ours and not is_later else None
