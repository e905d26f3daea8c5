"""The status line of a queued operation."""

import asyncio
import io
from datetime import timedelta

import pytest

from twinkle.api.model.v1 import training_service_pb2 as wire
from twinkle_client.errors import RetryableError
from twinkle_client.model.queue_status import queue_status_line, queue_status_shown, show_queue_status


class Terminal(io.StringIO):
    """A terminal that records its output."""

    def isatty(self) -> bool:
        return True


def queued(position: int, seconds: float | None = None) -> wire.GetOperationResponse:
    """Return the record of an operation at this queue position, which counts from 0."""
    record = wire.GetOperationResponse(state=wire.OPERATION_STATE_QUEUED, queue_position=position)
    if seconds is not None:
        record.estimated_wait.FromTimedelta(timedelta(seconds=seconds))
    return record


@pytest.mark.parametrize(
    ('record', 'line'),
    [
        (queued(0), 'queued, 1st in line'),
        (queued(1, 12.3), 'queued, 2nd in line, about 12 s'),
        (queued(2, 600), 'queued, 3rd in line, about 10 min'),
        (queued(10), 'queued, 11th in line'),
        (queued(111), 'queued, 112th in line'),
        (queued(121), 'queued, 122nd in line'),
        (wire.GetOperationResponse(state=wire.OPERATION_STATE_RUNNING), ''),
    ],
)
def test_status_line_shows_the_queue_position(record: wire.GetOperationResponse, line: str) -> None:
    """The status line counts queue positions from one, and is empty for a running operation."""
    assert queue_status_line(record) == line


async def test_line_is_updated_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each response replaces the line, a failed query does not change it, and the end of the wait clears it."""
    monkeypatch.setenv('TERM', 'xterm')
    terminal, is_exhausted = Terminal(), asyncio.Event()
    responses = iter([queued(1), None, queued(0)])

    async def query() -> wire.GetOperationResponse:
        response = next(responses, '')
        if response == '':
            is_exhausted.set()
            await asyncio.Event().wait()
        if not isinstance(response, wire.GetOperationResponse):
            raise RetryableError.__new__(RetryableError)
        return response

    task = asyncio.create_task(show_queue_status(query, terminal, delay=0.0, refresh=0.0))
    await is_exhausted.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    text = terminal.getvalue()
    assert text.index('2nd in line') < text.index('1st in line')
    assert text.endswith('\r\x1b[2K')


async def test_no_status_is_queried_without_a_terminal() -> None:
    """No task queries the status if the output is not a terminal."""

    async def query() -> wire.GetOperationResponse:
        raise AssertionError

    before = asyncio.all_tasks()
    async with queue_status_shown(query):
        assert asyncio.all_tasks() == before
