"""Rows of the data service as a file of this machine."""

from pathlib import Path

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
    """Write a dataset to a file, replacing it in one step; a stream that is cut is taken up where it stopped.

    Raises:
        ValueError: the format is unknown.
        Error: the server refuses, or is away for too long.
    """
    chosen = file_format or path.suffix.removeprefix('.').lower()
    if chosen not in _FORMATS:
        raise ValueError(f'format must be one of {", ".join(_FORMATS)}, got {chosen!r}')
    staging = path.with_name(f'.{path.name}.part')
    staging.parent.mkdir(parents=True, exist_ok=True)
    staging.write_bytes(b'')
    failures = 0
    while True:
        offset = staging.stat().st_size
        request = dataset_service_pb2.ExportDatasetRequest(
            dataset_id=dataset_id, format=_FORMATS[chosen], offset=offset
        )
        try:
            await _append(connection, request, staging)
            break
        except RetryableError:
            failures = 1 if staging.stat().st_size > offset else failures + 1
            if failures == MAX_FAILURES:
                raise
    staging.replace(path)


async def _append(connection: Connection, request: dataset_service_pb2.ExportDatasetRequest, path: Path) -> None:
    stub = DatasetServiceStub(connection.channel)
    with path.open('ab') as file:
        async for response in connection.stream(stub.ExportDataset, request):
            if checksum(response.chunk.data) != response.chunk.checksum:
                raise OSError(f'bytes of {path.name} were damaged on the way; save it again')
            file.write(response.chunk.data)
