"""Chunk checksums and upload digests: each is optional, and the server verifies those that it receives."""

from collections.abc import Mapping
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.checkpoint_engine import chunk_checksum
from twinkle_services.kit.checksums import write_prefix_sum
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import ChunkCorrupt, DigestMismatch, InvalidField, StoredDataDamaged
from twinkle_services.kit.resumable_uploads import Upload, UploadRules, UploadStore
from twinkle_services.kit.rpc.uploads import blake3_from_proto, sha256_from_proto, upload_chunk_from_proto
from twinkle_services.kit.upload_folder import UploadChunk, UploadHeader

DATA = b'0123456789'
OTHER = b'01234x6789'
BLAKE3, SHA256 = blake3(DATA).hexdigest(), sha256(DATA).hexdigest()
DIGESTS = [{'digest': BLAKE3}, {'sha256': SHA256}, {'digest': BLAKE3, 'sha256': SHA256}]
"""The digests that a header with at least one digest may have."""


class Storage:
    """An upload store, to which uploads with the id `u` are sent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = UploadStore(root, clock=FakeClock(), rules=UploadRules(time_to_live=timedelta(hours=1)))

    async def open(self, **digests: str) -> Upload:
        return await self.store.open('alice', UploadHeader(upload_id='u', size_bytes=len(DATA), **digests))

    async def send(self, *chunks: UploadChunk, **digests: str) -> None:
        """Send chunks in one stream, and verify the upload if it is complete."""
        upload = await self.open(**digests)
        try:
            for chunk in chunks:
                await upload.add(chunk)
            if upload.status.is_complete:
                await upload.verify()
        finally:
            await upload.close()

    async def read(self) -> bytes | None:
        return await self.store.read('alice', 'u')


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """An empty store."""
    return Storage(tmp_path)


def _chunk(data: bytes, offset: int = 0) -> UploadChunk:
    return UploadChunk(offset=offset, data=data)


@pytest.mark.parametrize('digests', [{}, *DIGESTS])
@pytest.mark.parametrize(
    'sums',
    [{}, {'checksum': chunk_checksum(DATA)}, {'sha256': bytes.fromhex(SHA256)}],
    ids=['unchecked', 'xxh3', 'sha256'],
)
async def test_checksums_and_digests_are_optional(
    storage: Storage, digests: dict[str, str], sums: Mapping[str, Any]
) -> None:
    """An upload with any selection of correct checksums and digests is stored."""
    await storage.send(UploadChunk(offset=0, data=DATA, **sums), **digests)
    assert await storage.read() == DATA


@pytest.mark.parametrize(
    ('sums', 'field'),
    [
        ({'checksum': 0}, 'chunk.checksum'),
        ({'sha256': bytes(32)}, 'chunk.sha256'),
        ({'checksum': chunk_checksum(b'89'), 'sha256': bytes(32)}, 'chunk.sha256'),
        ({'checksum': 1, 'sha256': sha256(b'89').digest()}, 'chunk.checksum'),
    ],
)
async def test_a_wrong_checksum_refuses_the_chunk(storage: Storage, sums: Mapping[str, Any], field: str) -> None:
    """The error for a chunk with a wrong checksum names the field and the offset, and earlier bytes remain."""
    with pytest.raises(ChunkCorrupt) as refusal:
        await storage.send(_chunk(DATA[:8]), UploadChunk(offset=8, data=DATA[8:], **sums))
    assert (refusal.value.field, refusal.value.offset) == (field, 8)
    assert refusal.value.metadata()['field'] == field
    await storage.send(_chunk(DATA[8:], 8))
    assert await storage.read() == DATA


@pytest.mark.parametrize(
    ('digests', 'field'),
    [
        ({'digest': '0' * 64}, 'header.digest'),
        ({'sha256': '0' * 64}, 'header.sha256'),
        ({'digest': BLAKE3, 'sha256': '0' * 64}, 'header.sha256'),
        ({'digest': '0' * 64, 'sha256': SHA256}, 'header.digest'),
    ],
)
async def test_a_wrong_digest_removes_the_upload(storage: Storage, digests: dict[str, str], field: str) -> None:
    """A complete upload that does not match a digest is removed, and can be sent again under the same id."""
    with pytest.raises(DigestMismatch) as refusal:
        await storage.send(_chunk(DATA), **digests)
    assert refusal.value.field == field
    assert (await storage.read(), list(storage.root.iterdir())) == (None, [])
    await storage.send(_chunk(DATA), sha256=SHA256)
    assert await storage.read() == DATA


async def test_a_complete_upload_is_verified_once(storage: Storage) -> None:
    """Later streams without new bytes compare only the stored sum; if it is lost, the digests are compared again."""
    await storage.send(_chunk(DATA), sha256=SHA256)
    (file,) = storage.root.glob('*/*/bytes')
    file.write_bytes(OTHER)
    write_prefix_sum(file)
    await storage.send(sha256=SHA256)
    file.with_name('bytes.b3').unlink()
    with pytest.raises(DigestMismatch):
        await storage.send(sha256=SHA256)
    assert list(storage.root.iterdir()) == []


async def test_an_upload_that_was_not_verified_is_verified_by_the_next_stream(storage: Storage) -> None:
    """If a service is killed before it verifies a complete upload, the next stream verifies the upload."""
    await storage.send(_chunk(DATA), sha256=SHA256)
    (header,) = storage.root.glob('*/*/header.json')
    header.unlink()
    upload = await storage.open(sha256=SHA256)
    await upload.add(_chunk(OTHER))
    await upload.close()
    with pytest.raises(DigestMismatch):
        await storage.send(sha256=SHA256)


@pytest.mark.parametrize('digests', [{}, *DIGESTS])
async def test_a_changed_file_is_not_read(storage: Storage, digests: dict[str, str]) -> None:
    """Bytes that change on the disk are detected, with and without a digest from the client."""
    await storage.send(_chunk(DATA), **digests)
    (file,) = storage.root.glob('*/*/bytes')
    file.write_bytes(OTHER)
    with pytest.raises(StoredDataDamaged):
        await storage.read()


@pytest.mark.parametrize('digests', DIGESTS)
async def test_a_changed_file_without_a_stored_sum_is_not_read(storage: Storage, digests: dict[str, str]) -> None:
    """The client's digests also protect an upload whose stored sum is lost."""
    await storage.send(_chunk(DATA), **digests)
    (file,) = storage.root.glob('*/*/bytes')
    file.write_bytes(OTHER)
    file.with_name('bytes.b3').unlink()
    with pytest.raises(StoredDataDamaged):
        await storage.read()


async def test_other_bytes_under_an_id_are_refused_without_a_digest(storage: Storage) -> None:
    """Bytes that are sent again without a digest are refused unless they equal the stored bytes."""
    await storage.send(_chunk(DATA[:6]))
    with pytest.raises(InvalidField) as refusal:
        await storage.send(_chunk(OTHER))
    assert refusal.value.field == 'chunk.data'
    assert 'upload_id' in refusal.value.problem
    await storage.send(_chunk(DATA))
    with pytest.raises(InvalidField):
        await storage.send(_chunk(OTHER[3:8], 3))
    assert await storage.read() == DATA


@pytest.mark.parametrize('digests', DIGESTS)
async def test_a_digest_identifies_the_bytes_of_an_id(storage: Storage, digests: dict[str, str]) -> None:
    """A header whose digests differ from the first header's is refused, and the error names the first such field."""
    await storage.send(_chunk(DATA[:6]), **digests)
    for changed in ({}, dict.fromkeys(digests, '0' * 64)):
        with pytest.raises(InvalidField) as refusal:
            await storage.open(**changed)
        assert refusal.value.field == f'header.{next(iter(digests))}'


@pytest.mark.parametrize(
    ('convert', 'field'),
    [
        (lambda: blake3_from_proto(SHA256.upper(), 'header.digest'), 'header.digest'),
        (lambda: blake3_from_proto(SHA256[1:], 'header.digest'), 'header.digest'),
        (lambda: sha256_from_proto(SHA256.encode(), 'header.sha256'), 'header.sha256'),
        (lambda: upload_chunk_from_proto(tensor_pb2.TensorChunk(sha256=bytes(31))), 'chunk.sha256'),
        (lambda: upload_chunk_from_proto(tensor_pb2.TensorChunk(offset=-1)), 'chunk.offset'),
    ],
)
def test_malformed_digests_are_refused_by_field(convert: Any, field: str) -> None:
    """A digest of the wrong size or form is refused with an error that names its field."""
    with pytest.raises(InvalidField) as refusal:
        convert()
    assert refusal.value.field == field


def test_an_unset_checksum_differs_from_zero() -> None:
    """A checksum that was set to 0 is verified, and an unset one is not."""
    unset, zero = tensor_pb2.TensorChunk(data=DATA), tensor_pb2.TensorChunk(data=DATA, checksum=0)
    assert [upload_chunk_from_proto(chunk).checksum for chunk in (unset, zero)] == [None, 0]
    assert (blake3_from_proto('', 'header.digest'), sha256_from_proto(b'', 'header.sha256')) == ('', '')
