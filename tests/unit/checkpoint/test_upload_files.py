"""Uploads as files: room for them, and what becomes of one whose stream is cut off."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from services.checkpoint.backends.upload_files import UploadFile, UploadFiles
from services.kit.errors import InUse, QuotaExceeded
from services.kit.worker import Threads
from twinkle.checkpoint_engine import iter_chunks

LIMIT = 100


@pytest.fixture
def threads() -> Iterator[Threads]:
    """A thread of its own for every call there may be."""
    made = Threads('uploads', count=4)
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path, threads: Threads) -> UploadFiles:
    """No uploads yet."""
    return UploadFiles(tmp_path, threads, plain_limit_bytes=LIMIT)


async def _open_again(files: UploadFiles, upload_id: str, threads: Threads) -> UploadFile:
    """Return the upload once whoever had it let go."""
    for _ in range(1000):
        try:
            return await files.open('alice', upload_id, size_bytes=1)
        except InUse:
            await threads.run(int)
    raise AssertionError('it stays in use')


async def test_an_upload_that_is_cancelled_while_it_is_let_go_is_free_again(tmp_path: Path) -> None:
    """Another stream may go on with it."""
    threads = Threads('uploads', count=1)
    files = UploadFiles(tmp_path, threads, plain_limit_bytes=LIMIT)
    upload = await files.open('alice', 'up', size_bytes=1)
    may_go_on = Event()
    busy = asyncio.ensure_future(threads.run(may_go_on.wait, 30))
    closing = asyncio.ensure_future(upload.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    may_go_on.set()
    await busy
    await (await _open_again(files, 'up', threads)).close()
    threads.close()


async def test_unfinished_uploads_of_a_tenant_have_so_much_room_together(files: UploadFiles) -> None:
    """One that is being sent takes what it announced, one that is not what it holds."""
    first = await files.open('alice', 'first', size_bytes=60)
    with pytest.raises(QuotaExceeded, match='bytes'):
        await files.open('alice', 'second', size_bytes=60)
    await (await files.open('bob', 'second', size_bytes=60)).close()
    for chunk in iter_chunks(bytes(50)):
        await first.add(chunk)
    await first.close()
    with pytest.raises(QuotaExceeded, match='bytes'):
        await files.open('alice', 'second', size_bytes=51)
    await (await files.open('alice', 'second', size_bytes=50)).close()
    await (await files.open('alice', 'first', size_bytes=60)).close()
