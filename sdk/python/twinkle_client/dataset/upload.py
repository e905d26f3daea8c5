"""Uploads of local rows and files to the data service, which continue after a broken connection."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2
from twinkle.api.data.v1.dataset_service_pb2_grpc import DatasetServiceStub
from twinkle_client.errors import RetryableError
from twinkle_client.rpc import Connection, new_id
from twinkle_client.transfer import MAX_FAILURES, file_chunks


async def upload_table(connection: Connection, data: Any, selection: Any) -> dataset_pb2.DatasetSource:
    """Upload a `datasets.Dataset` as Parquet, which preserves its column types."""
    if selection is not None:
        indexes = range(len(data))
        data = data.select(
            indexes[selection] if isinstance(selection, slice) else [row for row in selection if row in indexes]
        )
    if not len(data):
        raise ValueError('data: there are no rows; pass at least one')
    with tempfile.TemporaryDirectory(prefix='twinkle-') as folder:
        path = Path(folder) / 'rows.parquet'
        data.to_parquet(str(path))
        return await upload_file(connection, path, dataset_pb2.FILE_FORMAT_PARQUET)


async def upload_lines(connection: Connection, lines: list[str]) -> dataset_pb2.DatasetSource:
    """Upload lines of JSON."""
    if not lines:
        raise ValueError('data: there are no rows; pass at least one')
    with _temporary_file('\n'.join(lines) + '\n') as path:
        return await upload_file(connection, path, dataset_pb2.FILE_FORMAT_JSONL)


async def upload_file(
    connection: Connection, path: Path, file_format: dataset_pb2.FileFormat.ValueType
) -> dataset_pb2.DatasetSource:
    """Upload a file, resuming after a broken connection."""
    stub = DatasetServiceStub(connection.channel)
    upload_id = new_id('up')
    committed, failures = 0, 0
    while True:
        requests = _upload_requests(path, upload_id, offset=committed)
        try:
            await connection.upload(stub.Upload, requests, request_type=dataset_service_pb2.UploadRequest)
            break
        except RetryableError:
            failures += 1
            if failures == MAX_FAILURES:
                raise
            state = await connection.unary(stub.GetUpload, dataset_service_pb2.GetUploadRequest(upload_id=upload_id))
            failures = failures if state.committed_bytes == committed else 0
            committed = state.committed_bytes
    upload = dataset_pb2.UploadSource(upload_id=upload_id, format=file_format)
    return dataset_pb2.DatasetSource(upload=upload)


async def _upload_requests(
    path: Path, upload_id: str, *, offset: int
) -> AsyncIterator[dataset_service_pb2.UploadRequest]:
    size = _file_size(path)
    header = dataset_service_pb2.UploadHeader(upload_id=upload_id, size_bytes=size)
    yield dataset_service_pb2.UploadRequest(header=header)
    async for chunk in file_chunks(path, offset=offset):
        yield dataset_service_pb2.UploadRequest(chunk=chunk)


@contextmanager
def _temporary_file(text: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix='twinkle-') as folder:
        path = Path(folder) / 'rows.jsonl'
        path.write_text(text, encoding='utf-8')
        yield path


def _file_size(path: Path) -> int:
    return path.stat().st_size
