"""Merging of several asynchronous streams into one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar, cast

_Item = TypeVar('_Item')

_READ_AHEAD = 2
"""Number of buffered items per stream. When the buffer is full, the streams wait."""


async def merged(streams: Sequence[AsyncGenerator[_Item, None]]) -> AsyncIterator[_Item]:
    """Yield the items of all streams as they arrive. Closing the generator closes the streams.

    The error of the first stream that fails propagates, and the other streams are closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[tuple[_Item] | asyncio.Task[None]] = asyncio.Queue(_READ_AHEAD * max(len(streams), 1))
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            received = await queue.get()
            if isinstance(received, tuple):
                yield received[0]
                continue
            left -= 1
            await received
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[_Item, None], queue: 'asyncio.Queue[tuple[_Item] | asyncio.Task[None]]') -> None:
    """Put all items into the queue, followed by this task, whose result shows whether the stream failed."""
    task = cast('asyncio.Task[None]', asyncio.current_task())
    async with aclosing(stream):
        try:
            async for item in stream:
                await queue.put((item,))
        except Exception:
            await queue.put(task)
            raise
    await queue.put(task)
