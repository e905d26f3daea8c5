"""Runs all database work in one thread. Jobs that are waiting at the same time share a transaction and a sync."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import structlog

from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.sqlite_seals import COUNT_COMMIT, DatabaseMark
from twinkle_services.kit.telemetry import measures
from twinkle_services.model.domain.errors import JournalUnavailable

_log = structlog.get_logger('journal')
_Result = TypeVar('_Result')

GROUP = 256
"""Maximum number of jobs per transaction, not counting retried jobs."""
LAZY_SECONDS = 0.25
"""Maximum time in seconds until the writer receives a lazy job, which was added with `Writer.add`."""


@dataclass
class Transaction:
    """The transaction in which a job runs."""

    connection: sqlite3.Connection
    after_commit: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """Functions that the writer's thread calls after the commit."""

    size_bytes: int = 0
    """Total size of the `bytes` values of the statements."""

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        self.size_bytes += sum(len(value) for value in values if isinstance(value, bytes))
        return self.connection.execute(statement, values)


@dataclass(eq=False)
class _Job:
    work: Callable[[Transaction], Any]
    future: 'asyncio.Future[Any] | None' = None
    """None for a lazy job, which has no waiter and is retried after a disk error."""
    result: Any = None
    error: BaseException | None = None
    size_bytes: int = 0
    after_commit: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


class Writer:
    """Runs jobs in order of arrival, in groups. Concurrency: use it from one event loop only."""

    def __init__(self, connection: sqlite3.Connection, *, mark: DatabaseMark | None = None) -> None:
        """Start the writer, which takes ownership of `connection`. Without a `mark`, jobs may only read."""
        self._connection = connection
        self._mark = mark
        self._begin = 'BEGIN' if mark is None else 'BEGIN IMMEDIATE'
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lazy: list[_Job] = []
        self._retries: list[_Job] = []
        """Lazy jobs whose transaction failed; used by the writer's thread only."""
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._run, name='journal', daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Run `work` in a transaction after all earlier jobs, even lazy ones, and return its result once it is durable.

        Raises:
            sqlite3.Error: The disk failed; nothing was written.
            DomainError: `work` raised it; nothing was written.
        """
        job = _Job(work, self._loop.create_future())
        self.flush()
        self._jobs.put(job)
        assert job.future is not None  # noqa: S101 - created above
        return await job.future

    def add(self, work: Callable[[Transaction], Any]) -> None:
        """Run `work` in one of the next transactions, without waiting. `work` is retried after a disk error."""
        self._lazy.append(_Job(work))
        if len(self._lazy) >= GROUP // 2:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(LAZY_SECONDS, self.flush)

    def flush(self) -> None:
        """Pass all lazy jobs to the writer's thread now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for job in self._lazy:
            self._jobs.put(job)
        self._lazy.clear()

    def shorten_log(self) -> None:
        """Copy the write-ahead log to the database and sync the mark; call this in the writer's thread."""
        with suppress(sqlite3.Error):
            self._connection.execute('PRAGMA wal_checkpoint(PASSIVE)')
        if self._mark is not None:
            self._mark.sync()

    async def close(self) -> None:
        """Run the remaining jobs, close the connection, and stop the thread."""
        self.flush()
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            received = [self._jobs.get()]
            with suppress(Empty):
                while len(received) < GROUP:
                    received.append(self._jobs.get_nowait())
            is_closing = None in received
            self._write([*self._retries, *(job for job in received if job is not None)])
        self._connection.close()
        if self._mark is not None:
            self._mark.close()

    def _write(self, jobs: list[_Job]) -> None:
        self._retries = []
        if not self._commit(jobs) and len(jobs) > 1:
            # One job may have caused the error: run them separately.
            for job in jobs:
                job.error = None
                self._commit([job])
        self._retries = [job for job in jobs if job.future is None and isinstance(job.error, sqlite3.Error)]
        for job in jobs:
            for action in job.after_commit:
                with suppress(OSError):
                    action()
        with suppress(RuntimeError):  # the event loop is closed, so there are no waiters
            self._loop.call_soon_threadsafe(_deliver, jobs)

    def _commit(self, jobs: list[_Job]) -> bool:
        begin = time.perf_counter()
        try:
            self._connection.execute(self._begin)
            for job in jobs:
                self._run_job(job)
            count = 0 if self._mark is None else self._connection.execute(COUNT_COMMIT).fetchone()[0]
            reach('journal.commit.before')
            self._connection.execute('COMMIT')
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._connection.execute('ROLLBACK')
            _log.error('transaction failed', jobs=len(jobs), error=str(error))
            for job in jobs:
                job.error, job.after_commit = error, []
            return False
        if self._mark is not None:
            self._mark.write(count)
            measures.journal_seconds.record(time.perf_counter() - begin)
            measures.journal_bytes.add(sum(job.size_bytes for job in jobs), 'row')
        reach('journal.commit.after')
        return True

    def _run_job(self, job: _Job) -> None:
        """Run one job in a savepoint, so that its failure does not affect the others."""
        transaction = Transaction(self._connection)
        self._connection.execute('SAVEPOINT job')
        try:
            job.result = job.work(transaction)
            job.after_commit, job.size_bytes = transaction.after_commit, transaction.size_bytes
        except sqlite3.Error:
            raise
        except Exception as error:
            self._connection.execute('ROLLBACK TO job')
            job.error = error
            if job.future is None and not isinstance(error, DomainError):
                _log.error('lazy write failed', exc_info=error)
        self._connection.execute('RELEASE job')


def _deliver(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future is None or job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


@contextmanager
def disk_errors_as_unavailable(adapter_id: str) -> Iterator[None]:
    """Convert errors of the disk to JournalUnavailable."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise JournalUnavailable(adapter_id) from error
