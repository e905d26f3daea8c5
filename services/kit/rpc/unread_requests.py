"""Reads the rest of a request stream before the response is sent.

If a call finishes while the client still writes, grpcio 1.85.1 (`aio._call._write`) reports INTERNAL to the client
instead of the status. Delete this module once that is fixed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_IDLE_SECONDS = 0.2
"""A client that sends nothing for this long is assumed to wait for the response, so the status reaches it."""
_MAX_SECONDS = 10.0
"""Maximum time to read; a client that sends for longer may miss the status."""


@asynccontextmanager
async def reading_rest(request: Any) -> AsyncIterator[None]:
    """Read the rest of a request stream after the block has returned or raised.

    Args:
        request: Request stream of grpc, or a single request, which has no rest.

    Cancellation: the rest of a cancelled call is not read.
    """
    try:
        yield
    except Exception:
        await _discard(request)
        raise
    else:
        await _discard(request)


@asynccontextmanager
async def reading_rest_if_refused(request: Any) -> AsyncIterator[None]:
    """Read the rest of a request stream only if the block raised.

    Args:
        request: See `reading_rest`.

    Cancellation: the rest of a cancelled call is not read.
    """
    try:
        yield
    except Exception:
        await _discard(request)
        raise


async def _discard(request: Any) -> None:
    if not hasattr(request, '__aiter__'):
        return
    messages = aiter(request)
    try:
        async with asyncio.timeout(_MAX_SECONDS):
            while True:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        return
