"""Uploads of batches: the order of messages in a stream, complete uploads, and the required scope.

tests/unit/kit/test_resumable_uploads.py tests the store of the uploads.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from blake3 import blake3

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import (
    DigestMismatch,
    InUse,
    InvalidField,
    ScopeMissing,
    StreamOutOfOrder,
    UploadNotFound,
)
from twinkle_services.kit.resumable_uploads import UploadRules, UploadStore
from twinkle_services.kit.upload_folder import UploadChunk, UploadHeader
from twinkle_services.model.application.upload_batch import ReadUpload, UploadBatch

ALICE = Caller(tenant_id='alice', key_id='k', scopes=frozenset({'train'}))
BOB = Caller(tenant_id='bob', key_id='k', scopes=frozenset({'train'}))


class Uploads:
    """The operations that upload and read batches, with a folder and a clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, FakeClock()
        store = UploadStore(root, clock=self.clock, rules=UploadRules(time_to_live=timedelta(hours=1)))
        self.upload, self.read = UploadBatch(store), ReadUpload(store)


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    """The operations with an empty store."""
    return Uploads(tmp_path)


def header_of(data: bytes) -> UploadHeader:
    """Return the header of an upload with these bytes."""
    return UploadHeader(upload_id='u', size_bytes=len(data), digest=blake3(data).hexdigest())


async def stream(*parts: UploadHeader | UploadChunk) -> AsyncIterator[UploadHeader | UploadChunk]:
    """Yield the messages of a stream."""
    for part in parts:
        yield part


async def broken(*parts: UploadHeader | UploadChunk) -> AsyncIterator[UploadHeader | UploadChunk]:
    """Yield messages and then lose the connection."""
    for part in parts:
        yield part
    raise ConnectionResetError


def chunks(data: bytes, *, begin: int = 0, chunk_bytes: int = 3) -> list[UploadChunk]:
    """Return the chunks of `data` from `begin` on."""
    offsets = range(begin, len(data), chunk_bytes)
    return [UploadChunk(offset=offset, data=data[offset : offset + chunk_bytes]) for offset in offsets]


async def test_an_upload_continues_after_a_broken_stream(uploads: Uploads) -> None:
    """The bytes before a broken stream are kept, and a sender may repeat some of them."""
    data = b'0123456789'
    with pytest.raises(ConnectionResetError):
        await uploads.upload(ALICE, broken(header_of(data), *chunks(data[:8])))
    assert (await uploads.upload(ALICE, stream(header_of(data)))).committed_bytes == 8
    with pytest.raises(UploadNotFound):
        await uploads.read(ALICE, 'u')
    status = await uploads.upload(ALICE, stream(header_of(data), *chunks(data, begin=4)))
    assert (status.committed_bytes, status.is_complete) == (10, True)
    assert await uploads.read(ALICE, 'u') == data
    with pytest.raises(UploadNotFound):
        await uploads.read(BOB, 'u')


@pytest.mark.parametrize(
    ('parts', 'error'),
    [
        ([], StreamOutOfOrder),
        ([UploadChunk(offset=0, data=b'x')], StreamOutOfOrder),
        ([header_of(b'right'), header_of(b'right')], StreamOutOfOrder),
        ([header_of(b'right'), UploadChunk(offset=1, data=b'ight')], StreamOutOfOrder),
        ([header_of(b'right'), UploadChunk(offset=0, data=b'rights')], InvalidField),
        ([header_of(b'right'), UploadChunk(offset=0, data=b'wrong')], DigestMismatch),
    ],
)
async def test_an_invalid_stream_is_refused(
    uploads: Uploads, parts: list[UploadHeader | UploadChunk], error: type[Exception]
) -> None:
    """A stream with messages out of order, too many bytes or other bytes is refused; the upload can be sent again."""
    with pytest.raises(error):
        await uploads.upload(ALICE, stream(*parts))
    with pytest.raises(UploadNotFound):
        await uploads.read(ALICE, 'u')
    await uploads.upload(ALICE, stream(header_of(b'right'), *chunks(b'right')))
    assert await uploads.read(ALICE, 'u') == b'right'


async def test_an_upload_expires(uploads: Uploads) -> None:
    """An upload that was unused for its time to live is not found, and the next call removes it."""
    await uploads.upload(ALICE, stream(header_of(b'data'), *chunks(b'data')))
    uploads.clock.advance(timedelta(minutes=61))
    with pytest.raises(UploadNotFound):
        await uploads.read(ALICE, 'u')
    assert list(uploads.root.iterdir()) == []


async def test_an_upload_has_one_sender_at_a_time(uploads: Uploads) -> None:
    """A second stream is refused until the first stream ends."""
    begun, may_finish = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[UploadHeader]:
        yield header_of(b'data')
        begun.set()
        await may_finish.wait()

    first = asyncio.create_task(uploads.upload(ALICE, slow()))
    await begun.wait()
    with pytest.raises(InUse):
        await uploads.upload(ALICE, stream(header_of(b'data')))
    may_finish.set()
    await first
    await uploads.upload(ALICE, stream(header_of(b'data')))


async def test_upload_and_read_require_the_scope(uploads: Uploads) -> None:
    """A key without the scope `train` cannot upload or read, and stores nothing."""
    sampler = Caller(tenant_id='alice', key_id='k', scopes=frozenset({'sample'}))
    with pytest.raises(ScopeMissing):
        await uploads.upload(sampler, stream(header_of(b'data')))
    with pytest.raises(ScopeMissing):
        await uploads.read(sampler, 'u')
    assert list(uploads.root.iterdir()) == []
