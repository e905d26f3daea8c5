"""Several streams read as one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar, cast

_Item = TypeVar('_Item')

_READ_AHEAD = 2
"""Items of each stream that may wait; behind them the streams keep what they have together."""


async def merged(streams: Sequence[AsyncGenerator[_Item, None]]) -> AsyncIterator[_Item]:
    """Yield the items of all streams as they come; closing it closes the streams.

    Raises:
        Exception: what the first stream that fails raises; the others are closed.
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
            news = await queue.get()
            if isinstance(news, tuple):
                yield news[0]
                continue
            left -= 1
            await news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[_Item, None], queue: 'asyncio.Queue[tuple[_Item] | asyncio.Task[None]]') -> None:
    """Put every item into the queue, and behind the last one this task itself, which knows how it ended."""
    task = cast('asyncio.Task[None]', asyncio.current_task())
    async with aclosing(stream):
        try:
            async for item in stream:
                await queue.put((item,))
        except Exception:
            await queue.put(task)
            raise
    await queue.put(task)
