"""Requests and results of futures as files, so that large ones never go through the database.

A file is written aside and renamed, so that a kill of the process leaves it whole or not there. What a loss of
power leaves depends on the disk; so each file begins with a digest of the rest, and one that does not match is
as good as none. Whether files and folders are synced besides is the caller's choice: it makes sense where the
database syncs its commits as well (PostgreSQL) and is wasted where it does not (SQLite with a log that is synced
from time to time, see `sql.database`), since either loss takes the future away.

Small ones go into files too. One in the row would save about a tenth of a millisecond of an operation that takes
several, and would make the table, which is kept for days, as large as all that was ever answered.
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from services.kit.errors import ServiceUnreachable
from services.kit.ids import new_id
from services.kit.worker import Threads

_NAME = re.compile(r'[a-z0-9][a-z0-9-]{3,120}\.[a-z]{1,16}')
_DIGEST_BYTES = 16
_ASIDE = '.half-'
"""Prefix of files that are being written."""
_STORE_ID = 'store-id'
"""The file that names the folder."""
_SHARD = slice(-2, None)
"""Of a name without its ending, so that no folder has more than some hundreds of files."""

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')
_log = structlog.get_logger('payloads')


class PayloadFiles:
    """Implements `ports.PayloadStore` in a folder, which several gateways may share."""

    def __init__(self, folder: Path, *, is_synced: bool, thread_count: int = 4) -> None:
        """Keep files in `folder`, made if need be; the caller closes this.

        Args:
            folder: in which folders of files are.
            is_synced: whether `put` returns only when a loss of power would not take the file away.
            thread_count: how many files are read or written at a time.
        """
        self._folder = folder
        self._is_synced = is_synced
        self._threads = Threads('payloads', count=thread_count)

    async def store_id(self) -> str:
        """Return what tells this folder from every other one, whatever it is called where; made if need be.

        Raises:
            ServiceUnreachable: the disk refused it.
        """
        return await self._run(_read_store_id, self._folder)

    def close(self) -> None:
        """End the threads, once what they do is done."""
        self._threads.close()

    async def put(self, name: str, data: bytes) -> None:
        """Keep `data`; the same name again replaces it.

        Raises:
            ServiceUnreachable: the disk refused it.
        """
        await self._run(_write, self._path(name), data, is_synced=self._is_synced)

    async def get(self, name: str) -> bytes | None:
        """Return what is kept under the name, or None.

        Raises:
            ServiceUnreachable: the disk refused it.
        """
        return await self._run(_read, self._path(name))

    async def size(self, name: str) -> int:
        """Return how many bytes `get` would return; 0 where that is None.

        Raises:
            ServiceUnreachable: the disk refused it.
        """
        return await self._run(_size, self._path(name))

    async def delete(self, name: str) -> None:
        """Forget it; one that is not there is no error.

        Raises:
            ServiceUnreachable: the disk refused it.
        """
        await self._run(_drop, self._path(name))

    async def list_old(self, *, kept_before: datetime) -> Sequence[str]:
        """Return the names of what was kept before then, half-written ones of that age taken away.

        Raises:
            ServiceUnreachable: the disk refused it.
        """
        return await self._run(_list_old, self._folder, kept_before.timestamp())

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f'not the name of a payload: {name!r}')
        return self._folder / name.partition('.')[0][_SHARD] / name

    async def _run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        try:
            return await self._threads.run(function, *args, **kwargs)
        except OSError as error:
            _log.warning('payloads cannot be kept or read', exc_info=error)
            raise ServiceUnreachable('payload store') from error


def _read_store_id(folder: Path) -> str:
    path = folder / _STORE_ID
    if not path.exists():
        aside = folder / f'{_ASIDE}{new_id("pl")}'
        folder.mkdir(parents=True, exist_ok=True)
        aside.write_text(new_id('ps'))
        with suppress(FileExistsError):
            # Of several that begin at once, one makes it.
            path.hardlink_to(aside)
        aside.unlink()
    return path.read_text()


def _write(path: Path, data: bytes, *, is_synced: bool) -> None:
    aside = path.parent / f'{_ASIDE}{new_id("pl")}'
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with aside.open('xb') as file:
            file.write(_digest(data))
            file.write(data)
            file.flush()
            if is_synced:
                os.fdatasync(file.fileno())
        aside.rename(path)
        if is_synced:
            _sync_folder(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    data = content[_DIGEST_BYTES:]
    if content[:_DIGEST_BYTES] != _digest(data):
        _log.error('payload is damaged', name=path.name)
        return None
    return data


def _size(path: Path) -> int:
    try:
        return max(0, path.stat().st_size - _DIGEST_BYTES)
    except FileNotFoundError:
        return 0


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _drop(path: Path) -> None:
    path.unlink(missing_ok=True)


def _list_old(folder: Path, kept_before: float) -> list[str]:
    found: list[str] = []
    for path in folder.glob('*/*'):
        try:
            is_old = path.stat().st_mtime < kept_before
        except FileNotFoundError:
            continue
        if is_old and path.name.startswith(_ASIDE):
            _drop(path)
        elif is_old and _NAME.fullmatch(path.name):
            found.append(path.name)
    return found
