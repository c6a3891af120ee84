"""Ends work as soon as the client it is for has gone."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Receive

from api.errors import ApiError, Verdict

T = TypeVar("T")


async def run_while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Run `work` to its end, or cancel it and raise once the client disconnects."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(Verdict.CANCELLED, "The client went away")
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            # Its own cleanup (closing generations) belongs to this request too.
            await asyncio.wait({working})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
