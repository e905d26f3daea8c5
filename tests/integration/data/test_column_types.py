"""DatasetService over loopback: dates become text, and the error for an unsupported column names it."""

import asyncio
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
import pytest

from fixtures.data_service import RunningData, iterate, refusal_of, serving_data, upload_chunk, upload_header
from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2

FORMATS = {'.parquet': dataset_pb2.FILE_FORMAT_PARQUET, '.csv': dataset_pb2.FILE_FORMAT_CSV}
DATES = pa.table({'day': [date(2026, 1, 31)], 'at': pa.array([datetime(2026, 1, 31, tzinfo=UTC)], pa.timestamp('ms'))})
BYTES = pa.table({'image': pa.array([{'bytes': b'x'}])})
NOT_UTF8 = pa.table({'image': pa.array([b'\xff']).view(pa.string())})


def write(path: Path, table: Any) -> None:
    """Write a table in the format of the path's suffix."""
    if path.suffix == '.parquet':
        pa_parquet.write_table(table, path)
    elif path.suffix == '.csv':
        pa_csv.write_csv(table, path)
    else:
        with pa.OSFile(str(path), 'wb') as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)


async def source_of(service: RunningData, path: Path) -> dataset_pb2.DatasetSource:
    """Return a source that reads a file. The file is uploaded, unless its format cannot be uploaded."""
    if path.suffix not in FORMATS:
        return dataset_pb2.DatasetSource(hub=dataset_pb2.HubSource(dataset_id=str(path)))
    content = await asyncio.to_thread(path.read_bytes)
    parts = iterate([upload_header(path.name, len(content)), upload_chunk(0, content)])
    await service.datasets.Upload(parts, metadata=service.metadata)
    upload = dataset_pb2.UploadSource(upload_id=path.name, format=FORMATS[path.suffix])
    return dataset_pb2.DatasetSource(upload=upload)


@pytest.mark.parametrize('suffix', ['.parquet', '.csv', '.arrow'])
async def test_dates_are_stored_as_text(tmp_path: Path, suffix: str) -> None:
    """A file with dates becomes a dataset, and its export contains the dates as text."""
    path = tmp_path / f'rows{suffix}'
    write(path, DATES)
    async with serving_data(tmp_path / 'state', local_roots=[tmp_path]) as service:
        dataset = await service.create(await source_of(service, path))
        request = dataset_service_pb2.ExportDatasetRequest(
            dataset_id=dataset.dataset_id, format=dataset_pb2.FILE_FORMAT_JSONL
        )
        pieces = [part.chunk.data async for part in service.datasets.ExportDataset(request, metadata=service.metadata)]
    assert b''.join(pieces) == b'{"day": "2026-01-31", "at": "2026-01-31 00:00:00.000"}\n'


@pytest.mark.parametrize('table', [BYTES, NOT_UTF8], ids=['bytes', 'not UTF-8'])
@pytest.mark.parametrize('suffix', ['.parquet', '.arrow'])
async def test_other_columns_are_refused_by_name(tmp_path: Path, suffix: str, table: Any) -> None:
    """The error for a column of an unsupported type, or with invalid UTF-8, names the column."""
    path = tmp_path / f'rows{suffix}'
    write(path, table)
    async with serving_data(tmp_path / 'state', local_roots=[tmp_path]) as service:
        refusal = await refusal_of(service.create(await source_of(service, path)))
    assert (refusal.code, refusal.reason) == ('INVALID_ARGUMENT', 'INVALID_FIELD')
    assert 'image' in refusal.message
