"""Files that are uploaded to the data service without xxh3, which the libraries of some languages lack."""

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from fixtures.data_service import RunningData, iterate, refusal_of, serving_data, upload_header
from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import dataset_service_pb2 as wire

CONTENT = b'{"text": "one"}\n{"text": "two"}\n'
DIGEST = sha256(CONTENT).digest()
SOURCE = dataset_pb2.DatasetSource(upload=dataset_pb2.UploadSource(upload_id='u', format=dataset_pb2.FILE_FORMAT_JSONL))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[RunningData]:
    """A service without datasets."""
    async with serving_data(tmp_path) as running:
        yield running


def _chunk(*, digest: bytes = b'') -> wire.UploadRequest:
    return wire.UploadRequest(chunk={'data': CONTENT, 'sha256': digest})


@pytest.mark.parametrize(('in_header', 'in_chunk'), [(b'', b''), (DIGEST, b''), (b'', DIGEST), (DIGEST, DIGEST)])
async def test_checksums_of_a_file_are_optional(service: RunningData, in_header: bytes, in_chunk: bytes) -> None:
    """A file without xxh3 checksums, with SHA-256 of the file, of the chunk, of both or of neither, is read."""
    parts = iterate([upload_header('u', len(CONTENT), sha256=in_header), _chunk(digest=in_chunk)])
    assert (await service.datasets.Upload(parts, metadata=service.metadata)).is_complete
    assert (await service.create(SOURCE)).row_count == 2


@pytest.mark.parametrize(
    ('in_header', 'in_chunk', 'reason', 'field'),
    [
        (bytes(32), DIGEST, 'DIGEST_MISMATCH', 'header.sha256'),
        (DIGEST, bytes(32), 'CHUNK_CORRUPT', 'chunk.sha256'),
        (DIGEST.hex().encode(), b'', 'INVALID_FIELD', 'header.sha256'),
        (DIGEST, DIGEST[1:], 'INVALID_FIELD', 'chunk.sha256'),
    ],
)
async def test_a_wrong_digest_stores_nothing(
    service: RunningData, in_header: bytes, in_chunk: bytes, reason: str, field: str
) -> None:
    """The error for a malformed or wrong digest names its field, and the file can be sent again."""
    parts = iterate([upload_header('u', len(CONTENT), sha256=in_header), _chunk(digest=in_chunk)])
    refused = await refusal_of(service.datasets.Upload(parts, metadata=service.metadata))
    assert (refused.reason, refused.field) == (reason, field)
    again = iterate([upload_header('u', len(CONTENT), sha256=DIGEST), _chunk()])
    assert (await service.datasets.Upload(again, metadata=service.metadata)).is_complete
