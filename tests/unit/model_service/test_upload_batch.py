"""Uploads of batches: nothing is lost at a cut, nothing wrong is ever read, and nobody fills the disk."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kit.caller import Caller
from services.kit.clock import FakeClock
from services.kit.errors import (
    DigestMismatch,
    InUse,
    InvalidField,
    QuotaExceeded,
    ScopeMissing,
    StreamOutOfOrder,
    UploadNotFound,
)
from services.model.application.upload_batch import ReadUpload, UploadBatch
from services.model.backends.upload_files import UploadFiles, UploadLimits
from services.model.domain.upload import UploadChunk, UploadHeader

ALICE = Caller(tenant_id='alice', key_id='k', scopes=frozenset({'train'}))
BOB = Caller(tenant_id='bob', key_id='k', scopes=frozenset({'train'}))
LIMIT = 4096


class Cut(Exception):
    """The connection is gone."""


class Uploads:
    """The verbs over a folder and a clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, FakeClock()
        self.reopen()

    def reopen(self) -> None:
        """Begin anew on the same folder, as after kill -9."""
        limits = UploadLimits(tenant_bytes=LIMIT, time_to_live=timedelta(hours=1))
        self.store = UploadFiles(self.root, clock=self.clock, limits=limits)
        self.upload, self.read = UploadBatch(self.store), ReadUpload(self.store)


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    """An empty store."""
    return Uploads(tmp_path)


def header_of(data: bytes, *, upload_id: str = 'u') -> UploadHeader:
    """Return what announces these bytes."""
    return UploadHeader(upload_id=upload_id, size_bytes=len(data), digest=blake3(data).hexdigest())


async def parts(header: UploadHeader, data: bytes, *, begin: int = 0, chunk_bytes: int = 7, cut: bool = False):
    """Yield the header and what follows `begin`; then the connection may be gone."""
    yield header
    for offset in range(begin, len(data), chunk_bytes):
        yield UploadChunk(offset=offset, data=data[offset : offset + chunk_bytes])
    if cut:
        raise Cut


async def announced_only(header: UploadHeader) -> AsyncIterator[UploadHeader]:
    """Yield the header alone: asks where to go on."""
    yield header


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 60), chunk_bytes=st.integers(1, 60), places=st.lists(st.integers(0, 60), max_size=4))
def test_upload_cut_at_any_byte_is_gone_on_with(tmp_path_factory, size, chunk_bytes, places):
    """After cuts anywhere, and the end of the process, the whole is what was sent, and half is never read."""
    data = bytes(range(size))

    async def upload() -> bytes:
        target = Uploads(tmp_path_factory.mktemp('uploads'))
        header = header_of(data)
        committed = 0
        for place in places:
            sent = data[: max(committed, min(place, size - 1))]
            with pytest.raises(Cut):
                await target.upload(ALICE, parts(header, sent, begin=committed, chunk_bytes=chunk_bytes, cut=True))
            target.reopen()
            committed = (await target.upload(ALICE, announced_only(header))).committed_bytes
            assert committed == len(sent)
            with pytest.raises(UploadNotFound):
                await target.read(ALICE, 'u')
        status = await target.upload(ALICE, parts(header, data, begin=committed, chunk_bytes=chunk_bytes))
        assert status.committed_bytes == size
        return await target.read(ALICE, 'u')

    assert asyncio.run(upload()) == data


async def test_bytes_sent_again_are_taken_once(uploads):
    """A sender may go on further back than it must."""
    data = b'0123456789'
    with pytest.raises(Cut):
        await uploads.upload(ALICE, parts(header_of(data), data[:8], chunk_bytes=4, cut=True))
    await uploads.upload(ALICE, parts(header_of(data), data, chunk_bytes=3))
    assert await uploads.read(ALICE, 'u') == data


async def test_gap_is_refused_and_what_came_is_kept(uploads):
    """A chunk beyond the committed end is out of order."""
    data = b'0123456789'
    with pytest.raises(StreamOutOfOrder):
        await uploads.upload(ALICE, parts(header_of(data), data, begin=5))
    assert (await uploads.upload(ALICE, announced_only(header_of(data)))).committed_bytes == 0


async def test_another_tenant_s_upload_is_not_there(uploads):
    """The same id is another upload for another tenant, and reading tells nothing."""
    await uploads.upload(ALICE, parts(header_of(b'alice'), b'alice'))
    with pytest.raises(UploadNotFound):
        await uploads.read(BOB, 'u')
    await uploads.upload(BOB, parts(header_of(b'bob'), b'bob'))
    assert await uploads.read(ALICE, 'u') == b'alice'
    assert await uploads.read(BOB, 'u') == b'bob'


async def test_wrong_whole_is_thrown_away(uploads):
    """Bytes that do not match the digest leave nothing; the right ones can be sent."""
    header = header_of(b'right')
    with pytest.raises(DigestMismatch):
        await uploads.upload(ALICE, parts(header, b'wrong'))
    with pytest.raises(UploadNotFound):
        await uploads.read(ALICE, 'u')
    await uploads.upload(ALICE, parts(header, b'right'))
    assert await uploads.read(ALICE, 'u') == b'right'


async def test_damage_on_the_disk_is_not_read(uploads):
    """What a power cut left in a file is no upload."""
    await uploads.upload(ALICE, parts(header_of(b'right'), b'right'))
    (file,) = uploads.root.glob('*/*/bytes')
    file.write_bytes(b'wrong')
    with pytest.raises(UploadNotFound):
        await uploads.read(ALICE, 'u')


@pytest.mark.parametrize(('other', 'field'), [(b'longer', 'header.size_bytes'), (b'equal', 'header.digest')])
async def test_other_announcement_is_named(uploads, other, field):
    """An upload stays what it was announced as."""
    await uploads.upload(ALICE, announced_only(header_of(b'right')))
    with pytest.raises(InvalidField) as refusal:
        await uploads.upload(ALICE, announced_only(header_of(other)))
    assert refusal.value.field == field


async def test_more_than_announced_is_refused(uploads):
    """The header bounds what is taken."""
    with pytest.raises(InvalidField):
        await uploads.upload(ALICE, parts(header_of(b'short'), b'longer than that'))


async def test_tenant_is_bounded_by_what_it_announces(uploads):
    """Announced bytes count before they come, for that tenant alone, until they expire."""
    await uploads.upload(ALICE, announced_only(header_of(bytes(LIMIT - 10), upload_id='big')))
    with pytest.raises(QuotaExceeded):
        await uploads.upload(ALICE, announced_only(header_of(bytes(11))))
    await uploads.upload(BOB, announced_only(header_of(bytes(11))))
    uploads.clock.advance(timedelta(hours=2))
    await uploads.upload(ALICE, announced_only(header_of(bytes(11))))


async def test_use_keeps_an_upload_alive(uploads):
    """An upload goes an hour after it was last sent to or read."""
    await uploads.upload(ALICE, parts(header_of(b'data'), b'data'))
    for _ in range(3):
        uploads.clock.advance(timedelta(minutes=40))
        assert await uploads.read(ALICE, 'u') == b'data'
    uploads.clock.advance(timedelta(minutes=61))
    with pytest.raises(UploadNotFound):
        await uploads.read(ALICE, 'u')
    assert list(uploads.root.glob('*/*')) == []


async def test_upload_has_one_sender_at_a_time(uploads):
    """A second stream is refused while the first lasts, and taken after it."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow():
        yield header_of(b'data')
        begun.set()
        await go_on.wait()

    first = asyncio.create_task(uploads.upload(ALICE, slow()))
    await begun.wait()
    with pytest.raises(InUse):
        await uploads.upload(ALICE, announced_only(header_of(b'data')))
    go_on.set()
    await first
    await uploads.upload(ALICE, announced_only(header_of(b'data')))


async def test_key_that_may_not_train_uploads_nothing(uploads):
    """Both verbs ask for the scope."""
    sampler = Caller(tenant_id='alice', key_id='k', scopes=frozenset({'sample'}))
    with pytest.raises(ScopeMissing):
        await uploads.upload(sampler, announced_only(header_of(b'data')))
    with pytest.raises(ScopeMissing):
        await uploads.read(sampler, 'u')
    assert list(uploads.root.iterdir()) == []


async def test_chunk_before_the_header_is_refused(uploads):
    """A stream begins with what it is."""

    async def headless():
        yield UploadChunk(offset=0, data=b'x')

    with pytest.raises(StreamOutOfOrder):
        await uploads.upload(ALICE, headless())
