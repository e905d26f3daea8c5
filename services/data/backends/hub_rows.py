"""Rows of a hub that a process reads; see `hub_process.py`."""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

import structlog

from twinkle.dataset import DatasetError, size_in_memory
from twinkle.dataset.row_bounds import bounded_lines
from twinkle.hub import HubError, HubId, HubUnreachable, local_path
from twinkle_services.data.backends.bounded import rows_of_lines
from twinkle_services.data.backends.hub_process import END, FAILED, FOUND, ROW
from twinkle_services.data.domain import HubSource, HubStream, Row, RowMeter

_log = structlog.get_logger('data')

_SETTINGS = {'USE_TORCH': 'NO', 'USE_TF': 'NO', 'USE_JAX': 'NO'}
"""Environment variables that prevent the library from importing other libraries."""
_TOKENS = ('HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'HF_TOKEN_PATH', 'MODELSCOPE_API_TOKEN')
"""Environment variables from which clients of hubs would read a token."""
_ANONYMOUS = {'HF_HUB_DISABLE_IMPLICIT_TOKEN': '1'}
"""Environment variable that prevents the hub's client from using a login."""
_FAILED_STATUS = 1
"""Exit status of a process after an error, see `hub_process.main`."""


@dataclass(frozen=True)
class HubAccess:
    """Determines what callers may read with the permissions of the service."""

    local_roots: tuple[Path, ...] = ()
    """Folders without links whose files may be read by path."""
    token_repositories: frozenset[str] = frozenset()
    """Repositories and owners whose datasets and models may be private; `*` for all."""

    def is_local_allowed(self, dataset_id: str) -> bool:
        """Return whether a dataset id is a path that may be read."""
        path = local_path(dataset_id)
        return path is not None and any(path.resolve().is_relative_to(root) for root in self.local_roots)

    def is_private_allowed(self, hub_id: str) -> bool:
        """Return whether a repository may be read with the token of the service, or from the caches of hub clients."""
        try:
            name = HubId.parse(hub_id).name
        except HubError:
            return False
        return not self.token_repositories.isdisjoint({name, name.partition('/')[0], '*'})


class RowProcess:
    """A process that reads the rows of a hub dataset from the beginning. `close` ends it."""

    _process: subprocess.Popen[str] | None = None

    def __init__(self, source: HubSource, *, revision: str, access: HubAccess, memory_bytes: int) -> None:
        """Start the process.

        Args:
            source: The dataset.
            revision: Commit of the repository; empty for the current one.
            access: Determines whether the id may be a path, and whether the dataset may be private.
            memory_bytes: Maximum memory of the process.
        """
        is_private_allowed = access.is_private_allowed(source.dataset_id)
        request = {
            **asdict(source),
            'revision': revision,
            'is_local_allowed': access.is_local_allowed(source.dataset_id),
            'is_private_allowed': is_private_allowed,
            'memory_bytes': memory_bytes,
        }
        self._name = source.dataset_id
        # The library's cache contains datasets of the user of this service, which must not be found.
        # When the service exits, the process may still write to its folder, and removes the folder afterwards.
        self._cache = TemporaryDirectory(prefix='twinkle-', ignore_cleanup_errors=True)
        environment = {**os.environ, **_SETTINGS, 'HF_DATASETS_CACHE': self._cache.name}
        if not is_private_allowed:
            environment = {name: value for name, value in environment.items() if name not in _TOKENS} | _ANONYMOUS
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'twinkle_services.data.backends.hub_process', json.dumps(request)],
            env=environment,
            stdin=subprocess.PIPE,  # never written to; its end tells the process that the service has ended
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

    def raise_failure(self) -> None:
        """Raise the error of a process that failed, even if it has written rows before; no thread may be reading.

        Do nothing if a signal ended the process: a library may have crashed at the exit, after all rows were written.

        Raises:
            HubError, DatasetError: See `found`.
        """
        if cast('subprocess.Popen[str]', self._process).poll() == _FAILED_STATUS:
            deque(self._contents(''), maxlen=0)

    def kill(self) -> None:
        """End the process, so that a thread that waits for a row continues. Idempotent, callable from any thread."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process and close its output. Idempotent; no other thread may be reading."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for stream in filter(None, (process.stdin, process.stdout)):
                stream.close()
            self._cache.cleanup()

    def _contents(self, kind: str) -> Iterator[str]:
        """Yield the contents of the lines of a kind until the end."""
        process = cast('subprocess.Popen[str]', self._process)
        for line in bounded_lines(self._name, cast('IO[str]', process.stdout)):
            if line[0] == END:
                return
            if line[0] == FAILED:
                raise _error_of(self._name, *json.loads(line[1:]))
            if line[0] == kind:
                yield line[1:]
        _log.error('reader ended', dataset=self._name, status=process.wait())
        raise DatasetError(f'{self._name} cannot be read: the process that reads it ended')

    def __del__(self) -> None:
        self.close()


class StreamedRows:
    """The rows of a streamed dataset. Each iteration uses a new process, and only one iteration runs at a time."""

    def __init__(
        self, stream: HubStream, meter: RowMeter, *, access: HubAccess, memory_bytes: int, read_ahead: int
    ) -> None:
        """Store the arguments; the first iteration starts a process.

        Args:
            stream: The dataset.
            meter: Limits on the rows in memory.
            access: See `RowProcess`.
            memory_bytes: Maximum memory of a process.
            read_ahead: Maximum number of rows in memory that later steps have not processed completely.
        """
        self._stream, self._meter, self._read_ahead = stream, meter, read_ahead
        self._options: dict[str, Any] = {'access': access, 'memory_bytes': memory_bytes}
        self._process: RowProcess | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process of the next iteration, which opens the files while other rows are read. Idempotent."""
        if self._process is None and not self._is_closed:
            self._process = RowProcess(self._stream.hub, revision=self._stream.revision, **self._options)
            if self._is_closed:
                # `kill` ran while the process started.
                self._process.kill()

    def raise_failure(self) -> None:
        """Raise the error of the current iteration if its process failed; see `RowProcess.raise_failure`."""
        if self._process is not None:
            self._process.raise_failure()

    def __iter__(self) -> Iterator[Row]:
        self.start()
        process = self._process
        if process is None:
            return
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
            if self._process is process:
                self._process = None
            self._meter.charge(-sum(sizes), -len(sizes))

    def close(self) -> None:
        """End the process, if any; the next iteration starts another one. No other thread may be reading."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def kill(self) -> None:
        """End the process of an iteration, which then fails. Idempotent, and callable from any thread."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()


def _error_of(dataset_id: str, kind: str, problem: str) -> Exception:
    name = dataset_id.rpartition('://')[2]
    problem = problem if name in problem else f'{name}: {problem}'
    return HubUnreachable(problem) if kind == 'HubError' else DatasetError(problem)
