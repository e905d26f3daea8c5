"""Tests of counted attempts at work that may crash the process, such as exports of merged models."""

from datetime import timedelta

import pytest

from twinkle_services.kit.clock import FakeClock
from twinkle_services.model.application.attempts import MAX_ATTEMPTS, Attempts
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.domain.errors import OperationCrashed

WORK = 'ExportMerged of ad-1'
REFUSAL = OperationCrashed('ad-1', 1)


@pytest.fixture
async def journal() -> MemoryJournal:
    """The journal of a service that crashed in each attempt at the work."""
    journal = MemoryJournal()
    for _ in range(MAX_ATTEMPTS):
        await journal.count_attempt(WORK)
    journal.was_killed = True
    return journal


async def _is_refused(attempts: Attempts, work: str = WORK) -> bool:
    try:
        async with attempts.counted(work, refusal=REFUSAL):
            return False
    except OperationCrashed:
        return True


async def test_repeated_requests_stay_refused_after_a_crash(journal: MemoryJournal) -> None:
    """A client that keeps repeating a refused request cannot crash the service again; other work runs."""
    attempts = Attempts(journal, clock=FakeClock())
    assert [await _is_refused(attempts) for _ in range(5)] == [True] * 5
    assert not await _is_refused(attempts, 'ExportMerged of ad-2')


async def test_a_refusal_long_after_the_crash_allows_another_attempt(journal: MemoryJournal) -> None:
    """Some time after a refusal, the work is attempted again, because the cause of the crashes may be gone."""
    clock = FakeClock()
    attempts = Attempts(journal, clock=clock)
    clock.advance(timedelta(hours=1))
    assert await _is_refused(attempts)
    assert not await _is_refused(attempts)


async def test_work_that_ends_is_not_counted(journal: MemoryJournal) -> None:
    """Work that ends, with or without an error, resets its count and is therefore never refused."""
    attempts = Attempts(journal, clock=FakeClock())
    for _ in range(2 * MAX_ATTEMPTS):
        assert not await _is_refused(attempts, 'ExportMerged of ad-2')
        with pytest.raises(KeyError):
            async with attempts.counted('ExportMerged of ad-2', refusal=REFUSAL):
                raise KeyError
