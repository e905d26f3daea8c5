"""Requests and results of futures as files, so that large payloads never pass through the database.

A file is written under a temporary name, synced and renamed, and then its folder is synced. The file is therefore
complete and durable before the row that names it is committed. Each file begins with a digest, and a file that does not
match its digest counts as missing.

Small payloads are files too. Storing them in the database would save about 0.1 ms of an operation that takes several
milliseconds. However, the table would grow by the size of all results, because its rows are stored for days.
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

from twinkle_services.kit.disk_space import check_free_space
from twinkle_services.kit.errors import ServiceUnreachable
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.worker import Threads

_NAME = re.compile(r'[a-z0-9][a-z0-9-]{3,120}\.[a-z]{1,16}')
_DIGEST_BYTES = 16
_TEMPORARY = '.half-'
"""Prefix of the temporary names."""
_STORE_ID = 'store-id'
"""Name of the file with the id of the folder."""
_SHARD = slice(-2, None)
"""Part of a payload's name, before the dot, that names its subfolder, so that no folder has very many files."""

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')
_log = structlog.get_logger('payloads')


class PayloadFiles:
    """Implements `ports.PayloadStore` in a folder, which several gateways may share.

    Every method raises ServiceUnreachable if the disk fails.
    """

    def __init__(self, folder: Path, *, thread_count: int = 4, sync: Callable[[int], None] = os.fsync) -> None:
        self._folder = folder
        self._sync = sync
        self._threads = Threads('payloads', count=thread_count)

    async def store_id(self) -> str:
        """Return the id of the folder, which does not depend on its path; the first call creates the id."""
        return await self._run(_read_store_id, self._folder)

    def close(self) -> None:
        """Cancel queued calls, and stop the threads once the running calls return."""
        self._threads.close()

    async def check_free_space(self, size_bytes: int) -> None:
        await self._run(check_free_space, self._folder, size_bytes)

    async def put(self, name: str, data: bytes) -> None:
        await self._run(_write, self._path(name), data, self._sync)

    async def get(self, name: str) -> bytes | None:
        return await self._run(_read, self._path(name))

    async def size(self, name: str) -> int:
        return await self._run(_size, self._path(name))

    async def delete(self, name: str) -> None:
        await self._run(self._path(name).unlink, missing_ok=True)

    async def list_old(self, *, stored_before: datetime) -> Sequence[str]:
        """Return the names of data that was stored before a time, and delete temporary files of that age."""
        return await self._run(_list_old, self._folder, stored_before.timestamp())

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f'invalid payload name: {name!r}')
        return self._folder / name.partition('.')[0][_SHARD] / name

    async def _run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        try:
            return await self._threads.run(function, *args, **kwargs)
        except OSError as error:
            _log.warning('payload store failed', exc_info=error)
            raise ServiceUnreachable('payload store') from error


def _read_store_id(folder: Path) -> str:
    path = folder / _STORE_ID
    if not path.exists():
        temporary = folder / f'{_TEMPORARY}{new_id("pl")}'
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(new_id('ps'))
        with suppress(FileExistsError):
            # If several processes start at the same time, only one creates the file.
            path.hardlink_to(temporary)
        temporary.unlink()
    return path.read_bytes().decode(errors='replace')


def _write(path: Path, data: bytes, sync: Callable[[int], None]) -> None:
    temporary = path.parent / f'{_TEMPORARY}{new_id("pl")}'
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _sync_folder(path.parent.parent, sync)
    try:
        with temporary.open('xb') as file:
            file.write(_digest(data))
            file.write(data)
            file.flush()
            sync(file.fileno())
        temporary.rename(path)
        _sync_folder(path.parent, sync)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path, sync: Callable[[int], None]) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    data = content[_DIGEST_BYTES:]
    if content[:_DIGEST_BYTES] != _digest(data):
        _log.error('payload damaged', name=path.name)
        return None
    return data


def _size(path: Path) -> int:
    try:
        return max(0, path.stat().st_size - _DIGEST_BYTES)
    except FileNotFoundError:
        return 0


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _list_old(folder: Path, stored_before: float) -> list[str]:
    found: list[str] = []
    for path in folder.glob('*/*'):
        try:
            is_old = path.stat().st_mtime < stored_before
        except FileNotFoundError:
            continue
        if is_old and path.name.startswith(_TEMPORARY):
            path.unlink(missing_ok=True)
        elif is_old and _NAME.fullmatch(path.name):
            found.append(path.name)
    return found
