"""The upload store: resumption, digests, expiry, quotas, and streams that are cancelled or killed."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import (
    DataLoss,
    DiskFull,
    InUse,
    InvalidField,
    QuotaExceeded,
    StreamOutOfOrder,
)
from twinkle_services.kit.resumable_uploads import Upload, UploadQuota, UploadRules, UploadStore
from twinkle_services.kit.upload_folder import UploadChunk, UploadHeader

HOUR = timedelta(hours=1)
BINDING = UploadRules(time_to_live=HOUR, byte_quota=UploadQuota('bytes', 100), upload_quota=UploadQuota('uploads', 3))
"""Rules of a store in which the first header reserves the size."""
ANNOUNCED = replace(BINDING, is_header_binding=False)
"""Rules of a store in which each stream announces the size again."""


class Storage:
    """A folder and a clock, which several stores use one after the other."""

    def __init__(self, root: Path, rules: UploadRules = BINDING) -> None:
        self.root, self.rules, self.clock = root, rules, FakeClock()
        self.restart()

    def restart(self) -> None:
        """Open a new store on the same folder, for example after `kill -9`."""
        self.store = UploadStore(self.root, clock=self.clock, rules=self.rules)

    async def open(self, size_bytes: int, *, upload_id: str = 'u', tenant_id: str = 'alice') -> Upload:
        return await self.store.open(tenant_id, UploadHeader(upload_id=upload_id, size_bytes=size_bytes))

    async def announce(self, size_bytes: int, *, upload_id: str = 'u', tenant_id: str = 'alice') -> int:
        """Send a stream without chunks, and return the committed offset."""
        upload = await self.open(size_bytes, upload_id=upload_id, tenant_id=tenant_id)
        await upload.close()
        return upload.status.committed_bytes

    async def send(self, data: bytes, *, upload_id: str = 'u', tenant_id: str = 'alice', digest: str = '') -> None:
        """Send a complete upload in one stream."""
        header = UploadHeader(upload_id=upload_id, size_bytes=len(data), digest=digest)
        upload = await self.store.open(tenant_id, header)
        try:
            await upload.add(UploadChunk(offset=0, data=data))
            await upload.verify()
        finally:
            await upload.close()

    async def read(self, *, upload_id: str = 'u', tenant_id: str = 'alice') -> bytes | None:
        return await self.store.read(tenant_id, upload_id)

    def folders(self) -> list[Path]:
        """Return the folders of all uploads."""
        return list(self.root.glob('*/*'))


@pytest.fixture(params=[BINDING, ANNOUNCED], ids=['binding', 'announced'])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty store under each set of rules."""
    return Storage(tmp_path, request.param)


@pytest.fixture
def binding(tmp_path: Path) -> Storage:
    """An empty store in which the first header reserves the size."""
    return Storage(tmp_path, BINDING)


@pytest.fixture
def announced(tmp_path: Path) -> Storage:
    """An empty store in which each stream announces the size again."""
    return Storage(tmp_path, ANNOUNCED)


@settings(max_examples=50)
@given(size=st.integers(1, 60), chunk_bytes=st.integers(1, 60), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_an_upload_resumes_after_any_cut(size: int, chunk_bytes: int, cuts: list[int]) -> None:
    """An upload that is interrupted at any byte and resumed has unchanged bytes, and is readable only when complete."""
    data = bytes(range(size))

    async def send(storage: Storage, end: int) -> None:
        upload = await storage.open(size)
        for offset in range(upload.status.committed_bytes, end, chunk_bytes):
            await upload.add(UploadChunk(offset=offset, data=data[offset : min(offset + chunk_bytes, end)]))
        await upload.close()

    async def upload(root: str) -> bytes | None:
        storage, committed = Storage(Path(root)), 0
        for cut in cuts:
            committed = max(committed, min(cut, size - 1))
            await send(storage, committed)
            storage.restart()
            assert await storage.announce(size) == committed
            assert await storage.read() is None
        await send(storage, size)
        return await storage.read()

    with tempfile.TemporaryDirectory() as root:
        assert asyncio.run(upload(root)) == data


async def test_repeated_bytes_are_stored_once(storage: Storage) -> None:
    """A chunk that begins before the committed offset adds only its new bytes."""
    upload = await storage.open(10)
    for offset, data in ((0, b'0123'), (2, b'23456'), (0, b'01'), (7, b'789')):
        await upload.add(UploadChunk(offset=offset, data=data))
    await upload.close()
    assert await storage.read() == b'0123456789'


@pytest.mark.parametrize(
    ('offset', 'data', 'error'),
    [(5, b'x', StreamOutOfOrder), (5, b'x' * 9, StreamOutOfOrder), (4, b'12345678', InvalidField)],
)
async def test_a_refused_chunk_changes_nothing(
    storage: Storage, offset: int, data: bytes, error: type[Exception]
) -> None:
    """A chunk that leaves a gap or exceeds the announced size is refused, and earlier bytes remain."""
    upload = await storage.open(10)
    await upload.add(UploadChunk(offset=0, data=b'0123'))
    with pytest.raises(error):
        await upload.add(UploadChunk(offset=offset, data=data))
    await upload.close()
    assert await storage.announce(10) == 4


async def test_tenants_do_not_share_uploads(storage: Storage) -> None:
    """Two tenants with the same upload id have separate uploads."""
    await storage.send(b'alice')
    assert await storage.store.find('bob', 'u') is None
    await storage.send(b'bob', tenant_id='bob')
    assert [await storage.read(tenant_id=name) for name in ('alice', 'bob', 'eve')] == [b'alice', b'bob', None]


async def test_find_returns_the_state_of_an_upload(storage: Storage) -> None:
    """The status contains the header, the committed offset and the file with the bytes."""
    upload = await storage.open(4)
    await upload.add(UploadChunk(offset=0, data=b'da'))
    assert await storage.store.find('alice', 'u') == upload.status
    assert not upload.status.is_complete
    await upload.add(UploadChunk(offset=2, data=b'ta'))
    assert upload.status.is_complete
    assert upload.status.path.read_bytes() == b'data'
    await upload.close()


async def test_a_damaged_upload_is_not_read(storage: Storage) -> None:
    """An upload whose bytes changed on disk does not match its digest and is not read."""
    await storage.send(b'right', digest=blake3(b'right').hexdigest())
    (folder,) = storage.folders()
    (folder / 'bytes').write_bytes(b'wrong')
    with pytest.raises(DataLoss):
        await storage.read()


@pytest.mark.parametrize('damage', [b'', b'{"upload_id": "u"', None])
async def test_an_upload_with_a_damaged_header_starts_again(storage: Storage, damage: bytes | None) -> None:
    """An upload without a header is absent. An upload with a truncated header is damaged. Both can be sent again."""
    await storage.send(b'first')
    (folder,) = storage.folders()
    (folder / 'header.json').unlink() if damage is None else (folder / 'header.json').write_bytes(damage)
    with nullcontext() if damage is None else pytest.raises(DataLoss):
        assert await storage.read() is None
    assert await storage.announce(5) == 0
    await storage.send(b'again')
    assert await storage.read() == b'again'


async def test_a_discarded_upload_leaves_no_files(storage: Storage) -> None:
    """Discarding an upload removes its folder, and its id can be used again."""
    upload = await storage.open(4)
    await upload.add(UploadChunk(offset=0, data=b'data'))
    await upload.discard()
    await upload.close()
    assert list(storage.root.iterdir()) == []
    assert await storage.announce(9) == 0


@pytest.mark.parametrize(
    ('header', 'field'),
    [
        (UploadHeader(upload_id='u', size_bytes=6, digest='a'), 'header.size_bytes'),
        (UploadHeader(upload_id='u', size_bytes=5, digest='b'), 'header.digest'),
    ],
)
async def test_a_binding_header_must_be_repeated(binding: Storage, header: UploadHeader, field: str) -> None:
    """A header that differs from the first one is refused with the changed field."""
    first = await binding.store.open('alice', UploadHeader(upload_id='u', size_bytes=5, digest='a'))
    await first.close()
    for _ in range(2):
        with pytest.raises(InvalidField) as refusal:
            await binding.store.open('alice', header)
        assert refusal.value.field == field


async def test_an_announced_size_may_change(announced: Storage) -> None:
    """Each stream may announce a different size that is not below the number of stored bytes."""
    upload = await announced.open(10)
    await upload.add(UploadChunk(offset=0, data=b'0123'))
    await upload.close()
    assert await announced.announce(4) == 4
    with pytest.raises(InvalidField) as refusal:
        await announced.open(3)
    assert refusal.value.field == 'header.size_bytes'


async def test_a_binding_header_reserves_its_size(binding: Storage) -> None:
    """A tenant's announced bytes count against the quota until the upload expires."""
    await binding.announce(90, upload_id='big')
    with pytest.raises(QuotaExceeded) as refusal:
        await binding.announce(11)
    assert (refusal.value.quota, refusal.value.limit) == ('bytes', 100)
    await binding.announce(11, tenant_id='bob')
    await binding.announce(90, upload_id='big')
    binding.clock.advance(2 * HOUR)
    await binding.store.discard_expired()
    await binding.announce(11)


async def test_an_announced_size_counts_while_the_stream_is_open(announced: Storage) -> None:
    """An open upload counts with its announced size, and a closed one with its stored bytes."""
    first = await announced.open(60, upload_id='first')
    with pytest.raises(QuotaExceeded):
        await announced.open(60, upload_id='second')
    await announced.announce(60, upload_id='second', tenant_id='bob')
    await first.add(UploadChunk(offset=0, data=bytes(50)))
    await first.close()
    with pytest.raises(QuotaExceeded):
        await announced.open(51, upload_id='second')
    await announced.announce(50, upload_id='second')
    await announced.announce(60, upload_id='first')


async def test_an_upload_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path) -> None:
    """An upload that exceeds the free space, at once or when it grows, is refused before a byte is stored."""
    storage = Storage(tmp_path, UploadRules(time_to_live=HOUR, is_header_binding=False))
    with pytest.raises(DiskFull) as caught:
        await storage.announce(1 << 60)
    assert caught.value.needed_bytes == 1 << 60
    assert storage.folders() == []
    await storage.send(b'four')
    with pytest.raises(DiskFull) as caught:
        await storage.announce(1 << 60)
    assert caught.value.needed_bytes == (1 << 60) - 4
    assert await storage.announce(8) == 4


async def test_the_number_of_uploads_is_limited(storage: Storage) -> None:
    """A new upload beyond the quota is refused, and existing uploads continue."""
    for number in range(3):
        await storage.announce(1, upload_id=f'u{number}')
    with pytest.raises(QuotaExceeded) as refusal:
        await storage.announce(1, upload_id='u3')
    assert (refusal.value.quota, refusal.value.limit) == ('uploads', 3)
    assert await storage.announce(1, upload_id='u0') == 0
    await storage.announce(1, upload_id='u3', tenant_id='bob')


async def test_concurrent_uploads_do_not_exceed_a_quota(binding: Storage) -> None:
    """If the quota allows only one of two concurrent uploads, exactly one is accepted."""
    results = await asyncio.gather(
        *(binding.open(60, upload_id=f'u{number}') for number in range(2)), return_exceptions=True
    )
    assert {type(result) for result in results} == {Upload, QuotaExceeded}


async def test_use_extends_the_time_to_live(storage: Storage) -> None:
    """An upload expires one hour after its last stream or read."""
    await storage.send(b'data')
    for _ in range(3):
        storage.clock.advance(timedelta(minutes=40))
        await storage.store.discard_expired()
        assert await storage.read() == b'data'
    storage.clock.advance(timedelta(minutes=61))
    await storage.store.discard_expired()
    assert await storage.read() is None
    assert list(storage.root.iterdir()) == []


async def test_an_open_upload_does_not_expire(storage: Storage) -> None:
    """An upload with an open stream is kept, and its time to live begins when the stream is closed."""
    upload = await storage.open(4)
    storage.clock.advance(365 * 24 * HOUR)
    await storage.store.discard_expired()
    await upload.add(UploadChunk(offset=0, data=b'data'))
    await upload.close()
    await storage.store.discard_expired()
    assert await storage.read() == b'data'


async def test_files_of_an_earlier_layout_are_removed(storage: Storage) -> None:
    """Files that are not part of an upload are removed with the expired uploads."""
    await storage.send(b'data')
    (storage.root / 'alice-1').write_bytes(b'x')
    (storage.root / 'folder').mkdir()
    (storage.root / 'folder' / 'bytes').write_bytes(b'x')
    await storage.store.discard_expired()
    assert [path.name for path in storage.root.rglob('*') if path.is_file()].count('bytes') == 1
    assert not (storage.root / 'alice-1').exists()
    await storage.store.discard_expired()
    assert not (storage.root / 'folder').exists()


async def test_an_upload_has_one_stream_at_a_time(storage: Storage) -> None:
    """A second stream is refused until the first one is closed."""
    first = await storage.open(4)
    with pytest.raises(InUse):
        await storage.open(4)
    await storage.announce(4, tenant_id='bob')
    await first.close()
    assert await storage.announce(4) == 0


async def test_a_cancelled_close_frees_the_upload(storage: Storage) -> None:
    """An upload whose stream is cancelled becomes available once its last write has finished, not earlier."""
    upload = await storage.open(4)
    may_finish = Event()
    calls = [asyncio.create_task(upload.run(may_finish.wait, 30)), asyncio.create_task(upload.close())]
    for call in calls:
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    with pytest.raises(InUse):
        await storage.open(4)
    may_finish.set()
    await _until_free(storage)


async def test_a_cancelled_open_frees_the_upload(storage: Storage) -> None:
    """An upload whose opening is cancelled becomes available once the opening has finished."""
    opening = asyncio.create_task(storage.open(4))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await _until_free(storage)


async def _until_free(storage: Storage) -> None:
    for _ in range(1000):
        try:
            await storage.announce(4)
        except InUse:
            await asyncio.to_thread(int)
        else:
            return
    raise AssertionError('the upload is still in use')


async def test_a_close_that_cannot_write_frees_the_upload(storage: Storage) -> None:
    """A disk error while an upload is being closed does not keep it in use."""
    upload = await storage.open(3)
    (folder,) = storage.folders()
    shutil.rmtree(folder)
    folder.write_bytes(b'')
    await upload.close()
    folder.unlink()
    assert await storage.announce(3) == 0


def test_a_chunk_that_is_stored_in_part_leaves_no_bytes(tmp_path: Path) -> None:
    """A chunk that does not fit on the disk leaves the committed bytes unchanged."""
    path = tmp_path / 'bytes'
    path.write_bytes(b'abc')
    program = (
        'import resource, sys\n'
        'from pathlib import Path\n'
        'from twinkle_services.kit.upload_folder import append\n'
        'resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))\n'
        'try:\n'
        '    append(Path(sys.argv[1]), memoryview(bytes(100)))\n'
        'except OSError:\n'
        '    sys.exit(3)\n'
    )
    finished = subprocess.run([sys.executable, '-B', '-c', program, str(path)], check=False)
    assert finished.returncode == 3
    assert path.read_bytes() == b'abc'
