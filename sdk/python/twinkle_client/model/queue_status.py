"""The status line of a queued operation on a terminal."""

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
from twinkle_client.rpc.remote_methods import IS_BLOCKING

Query = Callable[[], Awaitable[training_service_pb2.GetOperationResponse]]
"""Fetches the record of the operation from the service."""

_DELAY_SECONDS = 2.0
_REFRESH_SECONDS = 1.0
_ORDINALS = {1: 'st', 2: 'nd', 3: 'rd'}


@asynccontextmanager
async def queue_status_shown(query: Query) -> AsyncIterator[None]:
    """Show the queue position on standard error while the block runs, after a delay of two seconds.

    Nothing is shown if standard error is not a terminal, or if the remote method was not called in its blocking form.
    """
    if not IS_BLOCKING.get() or not sys.stderr.isatty():
        yield
        return
    task = asyncio.create_task(show_queue_status(query, sys.stderr, delay=_DELAY_SECONDS, refresh=_REFRESH_SECONDS))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def show_queue_status(query: Query, terminal: TextIO, *, delay: float, refresh: float) -> None:
    """Refresh the status line until this coroutine is cancelled, then clear the line.

    Args:
        query: Fetches the record of the operation.
        terminal: Terminal to write to.
        delay: Seconds before the first line.
        refresh: Seconds between refreshes.
    """
    console = Console(file=terminal, emoji=False)
    await asyncio.sleep(delay)
    try:
        while True:
            with suppress(Error):
                console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
                console.print(queue_status_line(await query()), end='', highlight=False, markup=False)
            await asyncio.sleep(refresh)
    finally:
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def queue_status_line(record: training_service_pb2.GetOperationResponse) -> str:
    """Return the status line of a queued operation; empty if the operation is not queued."""
    if record.state != training_service_pb2.OPERATION_STATE_QUEUED:
        return ''
    position = record.queue_position + 1
    suffix = 'th' if position % 100 in range(11, 14) else _ORDINALS.get(position % 10, 'th')
    line = f'queued, {position}{suffix} in line'
    if not record.HasField('estimated_wait'):
        return line
    seconds = record.estimated_wait.ToTimedelta() / timedelta(seconds=1)
    return f'{line}, about {seconds:.0f} s' if seconds < 120 else f'{line}, about {seconds / 60:.0f} min'
