"""A line that says where an operation waits, for people in front of a terminal."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from twinkle.api.model.v1 import training_service_pb2
from twinkle_client.errors import Error
from twinkle_client.rpc.faces import IS_BLOCKING

Ask = Callable[[], Awaitable[training_service_pb2.GetOperationResponse]]

_QUIET_SECONDS = 2.0
_REFRESH_SECONDS = 1.0
_ORDINALS = {1: 'st', 2: 'nd', 3: 'rd'}


@asynccontextmanager
async def telling_the_wait(ask: Ask) -> AsyncIterator[None]:
    """Tell on the terminal, from the third second of the block on, where the operation is in its queue.

    Nothing is told where standard error is no terminal, or where the program has other things to do.

    Args:
        ask: the service, where the operation is.
    """
    if not IS_BLOCKING.get() or not sys.stderr.isatty():
        yield
        return
    telling = asyncio.create_task(tell_the_wait(ask, sys.stderr, quiet=_QUIET_SECONDS, refresh=_REFRESH_SECONDS))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def tell_the_wait(ask: Ask, terminal: TextIO, *, quiet: float, refresh: float) -> None:
    """Keep one line up to date until cancelled; then clear it.

    Args:
        ask: the service, where the operation is.
        terminal: where the line stands.
        quiet: seconds before the first word.
        refresh: seconds between questions.
    """
    console = Console(file=terminal)
    await asyncio.sleep(quiet)
    try:
        while True:
            with suppress(Error):
                console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
                console.print(wait_line(await ask()), end='', highlight=False, markup=False)
            await asyncio.sleep(refresh)
    finally:
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def wait_line(record: training_service_pb2.GetOperationResponse) -> str:
    """Return where an operation waits, in words; nothing once it runs."""
    if record.state != training_service_pb2.OPERATION_STATE_QUEUED:
        return ''
    place = record.queue_position + 1
    suffix = 'th' if place % 100 in range(11, 14) else _ORDINALS.get(place % 10, 'th')
    line = f'queued, {place}{suffix} in line'
    if not record.HasField('estimated_wait'):
        return line
    seconds = record.estimated_wait.ToTimedelta() / timedelta(seconds=1)
    return f'{line}, about {seconds:.0f} s' if seconds < 120 else f'{line}, about {seconds / 60:.0f} min'
