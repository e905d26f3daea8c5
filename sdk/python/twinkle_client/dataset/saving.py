"""Export of a dataset's rows to a local file."""

from pathlib import Path
from typing import BinaryIO

from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2
from twinkle.api.data.v1.dataset_service_pb2_grpc import DatasetServiceStub
from twinkle_client.errors import RetryableError
from twinkle_client.rpc import Connection
from twinkle_client.transfer import MAX_FAILURES, checksum

_FORMATS = {
    'jsonl': dataset_pb2.FILE_FORMAT_JSONL,
    'parquet': dataset_pb2.FILE_FORMAT_PARQUET,
    'csv': dataset_pb2.FILE_FORMAT_CSV,
}


async def save_dataset(connection: Connection, dataset_id: str, path: Path, *, file_format: str | None) -> None:
    """Write a dataset to a file atomically, resuming a broken stream.

    Raises:
        ValueError: The format is unknown.
        Error: The server refused the export, or was unavailable for too long.
        OSError: The file cannot be written, or a chunk was damaged during the transfer.
    """
    chosen = file_format or path.suffix.removeprefix('.').lower()
    if chosen not in _FORMATS:
        raise ValueError(f'format must be one of {", ".join(_FORMATS)}, got {chosen!r}')
    staging = path.with_name(f'.{path.name}.part')
    staging.parent.mkdir(parents=True, exist_ok=True)
    try:
        with staging.open('wb') as file:
            await _fetch(connection, dataset_id, file, _FORMATS[chosen])
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


async def _fetch(
    connection: Connection, dataset_id: str, file: BinaryIO, file_format: dataset_pb2.FileFormat.ValueType
) -> None:
    failures = 0
    while True:
        offset = file.tell()
        request = dataset_service_pb2.ExportDatasetRequest(dataset_id=dataset_id, format=file_format, offset=offset)
        try:
            return await _append(connection, request, file)
        except RetryableError:
            failures = 1 if file.tell() > offset else failures + 1
            if failures == MAX_FAILURES:
                raise


async def _append(connection: Connection, request: dataset_service_pb2.ExportDatasetRequest, file: BinaryIO) -> None:
    stub = DatasetServiceStub(connection.channel)
    async for response in connection.stream(stub.ExportDataset, request):
        if checksum(response.chunk.data) != response.chunk.checksum:
            raise OSError('the dataset was damaged during the transfer; save it again')
        file.write(response.chunk.data)
