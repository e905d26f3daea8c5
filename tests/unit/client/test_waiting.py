"""Whoever waits at a terminal is told where the operation stands; nobody else is."""

import asyncio
import io
from datetime import timedelta

import pytest

from twinkle.api.model.v1 import training_service_pb2 as wire
from twinkle_client.errors import RetryableError
from twinkle_client.model.waiting import tell_the_wait, telling_the_wait, wait_line


class Terminal(io.StringIO):
    """Keeps what is written to it."""

    def isatty(self) -> bool:
        """Say that it is one."""
        return True


def queued(position: int, seconds: float | None = None) -> wire.GetOperationResponse:
    """Return the record of an operation that waits."""
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
def test_place_is_told_in_words(record: wire.GetOperationResponse, line: str) -> None:
    """Places count from one; what runs is in no line."""
    assert wait_line(record) == line


async def test_line_is_kept_up_to_date_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer replaces the line, a failed question leaves it, and nothing stays at the end."""
    monkeypatch.setenv('TERM', 'xterm')
    terminal, told = Terminal(), asyncio.Event()
    answers = iter([queued(1), None, queued(0)])

    async def ask() -> wire.GetOperationResponse:
        answer = next(answers, '')
        if answer == '':
            told.set()
            await asyncio.Event().wait()
        if not isinstance(answer, wire.GetOperationResponse):
            raise RetryableError.__new__(RetryableError)
        return answer

    telling = asyncio.create_task(tell_the_wait(ask, terminal, quiet=0.0, refresh=0.0))
    await told.wait()
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    text = terminal.getvalue()
    assert text.index('2nd in line') < text.index('1st in line')
    assert text.endswith('\r\x1b[2K')


async def test_program_that_is_not_watched_is_told_nothing() -> None:
    """Where nobody waits at a terminal, nothing is asked."""

    async def ask() -> wire.GetOperationResponse:
        raise AssertionError

    before = asyncio.all_tasks()
    async with telling_the_wait(ask):
        assert asyncio.all_tasks() == before
