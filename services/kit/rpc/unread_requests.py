"""Takes in what a client still sends when its call is already decided.

grpcio fails a write into a call that has ended before it has looked at the status, and tells
its caller INTERNAL instead of the refusal (grpcio 1.85.1, `aio._call._write`; delete this module
when that is mended). So a client stream is read to its end before the call is answered.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_IDLE_SECONDS = 0.2
"""A client that sends nothing for this long is waiting for its answer, and cannot miss it."""
_LONGEST_SECONDS = 10.0
"""A client that goes on longer may miss its answer: reading for ever would cost more."""


@asynccontextmanager
async def reading_rest(request: Any) -> AsyncIterator[None]:
    """Read the rest of a stream of requests after the block, whether it returned or raised.

    Args:
        request: A stream of requests as grpc gives it, or a single request, which has no rest.

    Cancellation: a cancelled call is not read on.
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
    """Read the rest of a stream of requests after the block where it raised; else the client may go on as it likes.

    Args:
        request: As in `reading_rest`.

    Cancellation: a cancelled call is not read on.
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
        async with asyncio.timeout(_LONGEST_SECONDS):
            while True:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        return
