"""Several text streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from api.choice_text import TextDelta
from api.text_stream import TextStream

# Deltas a stream may be ahead of its reader.
MAX_QUEUED_DELTAS = 64

_Item = tuple[int, TextDelta] | BaseException | None


async def merged(streams: Sequence[TextStream]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield each delta with the index of its choice among all; the first error ends all.

    The choices of a stream have consecutive indexes, as many for each stream.
    """
    if len(streams) == 1:
        async for delta in streams[0]:
            yield delta.choice_index, delta
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue(MAX_QUEUED_DELTAS)
    tasks = [
        asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)
    ]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: TextStream, queue: asyncio.Queue[_Item]) -> None:
    start = index * len(stream.choices)
    try:
        async for delta in stream:
            await queue.put((start + delta.choice_index, delta))
        await queue.put(None)
    except Exception as error:  # noqa: BLE001
        # Handed to the reader, who raises it.
        await queue.put(error)
