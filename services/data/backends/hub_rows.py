"""Rows of a hub that a process reads; see `hub_process.py`."""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import IO, Any, cast

import structlog

from twinkle.dataset import DatasetError, size_in_memory
from twinkle.dataset.row_bounds import bounded_lines
from twinkle.hub import HubUnreachable
from twinkle_services.data.backends.bounded import rows_of_lines
from twinkle_services.data.backends.hub_process import END, FAILED, FOUND, ROW
from twinkle_services.data.domain import HubSource, HubStream, Row, RowMeter

_log = structlog.get_logger('data')


class RowProcess:
    """A process that reads the rows of a hub dataset from the beginning. `close` ends it."""

    _process: subprocess.Popen[str] | None = None

    def __init__(self, source: HubSource, *, revision: str, is_local_allowed: bool, memory_bytes: int) -> None:
        """Start the process.

        Args:
            source: The dataset.
            revision: Commit of the repository; empty for the current one.
            is_local_allowed: Whether the id may be a path.
            memory_bytes: Maximum memory of the process.
        """
        request = {
            **asdict(source), 'revision': revision, 'is_local_allowed': is_local_allowed, 'memory_bytes': memory_bytes
        }  # fmt: skip
        self._name = source.dataset_id
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'twinkle_services.data.backends.hub_process', json.dumps(request)],
            env={**os.environ, 'USE_TORCH': 'NO', 'USE_TF': 'NO', 'USE_JAX': 'NO'},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            encoding='utf-8',
        )

    def found(self) -> tuple[str, tuple[str, ...]]:
        """Return the commit of the repository and the columns of the first row. Call it before `rows`.

        Raises:
            HubError: The dataset was not found, or the hub did not respond.
            DatasetError: The dataset cannot be read.
        """
        revision, columns = json.loads(next(self._contents(FOUND)))
        return revision, tuple(columns)

    def rows(self, meter: RowMeter | None = None) -> Iterator[Row]:
        """Yield the rows.

        Args:
            meter: Limits, charged for a row while it is parsed. None for no limits.

        Raises:
            HubError, DatasetError: See `found`.
        """
        yield from rows_of_lines(self._name, self._contents(ROW), meter)

    def kill(self) -> None:
        """End the process, so that a thread that waits for a row continues. Idempotent, callable from any thread."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process and close its output. Idempotent; no other thread may be reading."""
        if self._process is not None and self._process.stdout is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _contents(self, kind: str) -> Iterator[str]:
        """Yield the contents of the lines of a kind until the end."""
        process = cast('subprocess.Popen[str]', self._process)
        for line in bounded_lines(self._name, cast('IO[str]', process.stdout)):
            if line[0] == END:
                return
            if line[0] == FAILED:
                raise _error_of(*json.loads(line[1:]))
            if line[0] == kind:
                yield line[1:]
        _log.error('reader ended', dataset=self._name, status=process.wait())
        raise DatasetError(f'{self._name} cannot be read: the process that reads it ended')

    def __del__(self) -> None:
        self.close()


class StreamedRows:
    """The rows of a streamed dataset; each iteration starts a process."""

    def __init__(
        self, stream: HubStream, meter: RowMeter, *, is_local_allowed: bool, memory_bytes: int, read_ahead: int
    ) -> None:
        """Keep the arguments.

        Args:
            stream: The dataset.
            meter: Limits on the rows in memory.
            is_local_allowed: Whether the id may be a path.
            memory_bytes: Maximum memory of a process.
            read_ahead: Maximum number of rows in memory that later steps have not processed completely.
        """
        self._stream, self._meter, self._read_ahead = stream, meter, read_ahead
        self._options: dict[str, Any] = {'is_local_allowed': is_local_allowed, 'memory_bytes': memory_bytes}
        self._process: RowProcess | None = None
        self._is_closed = False

    def __iter__(self) -> Iterator[Row]:
        if self._is_closed:
            return
        self._process = process = RowProcess(self._stream.hub, revision=self._stream.revision, **self._options)
        sizes = deque[int]()
        try:
            for row in process.rows(self._meter):
                sizes.append(size_in_memory(row))
                self._meter.charge(sizes[-1], 1)
                if len(sizes) > self._read_ahead:
                    self._meter.charge(-sizes.popleft(), -1)
                yield row
        finally:
            process.close()
            self._meter.charge(-sum(sizes), -len(sizes))

    def kill(self) -> None:
        """End the process of an iteration, which then fails. Idempotent, and callable from any thread."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()


def _error_of(kind: str, problem: str) -> Exception:
    return HubUnreachable(problem) if kind == 'HubError' else DatasetError(problem)
