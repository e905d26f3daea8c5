"""The memory of the data service stays near its limit although files would decode to far more than the limit."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest

from fixtures.data_process import data_process
from fixtures.data_service import RunningData, iterate, refusal_of, rows, upload_chunk, upload_header
from twinkle.api.data.v1 import dataset_pb2

DATASET_BYTES = 64 << 20
"""Limit of the service for the decoded size of a dataset, in bytes."""
OVERHEAD_BYTES = 192 << 20
"""Memory for pyarrow, which is loaded for the first file, and freed memory that the process keeps."""
FORMATS = {
    'parquet': dataset_pb2.FILE_FORMAT_PARQUET,
    'csv': dataset_pb2.FILE_FORMAT_CSV,
    'jsonl': dataset_pb2.FILE_FORMAT_JSONL,
}


@asynccontextmanager
async def limited_process(folder: Path) -> AsyncIterator[tuple[RunningData, psutil.Process]]:
    """Run the data service in a separate process, with the limit of the tests."""
    roots = json.dumps([str(folder.parent)])
    async with data_process(folder, dataset_bytes=DATASET_BYTES, local_roots=roots) as (service, process):
        yield service, psutil.Process(process.pid)


def hostile_files(folder: Path) -> dict[str, Path]:
    """Create files that each decode to several times the limit, and return their paths by suffix."""
    files = {suffix: folder / f'hostile.{suffix}' for suffix in (*FORMATS, 'json', 'arrow')}
    indices = pa.array([0] * 300_000, pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(['x' * 2000]))
    pa_parquet.write_table(pa.table({'text': texts}), files['parquet'], compression='zstd')
    header = ','.join(f'c{index}' for index in range(4000))
    files['csv'].write_text(header + '\n' + (',' * 3999 + '\n') * 5000)
    files['jsonl'].write_text(('{"x": [' + '[],' * 300_000 + '0]}\n') * 30)
    files['json'].write_text('[' + '{},' * 10_000_000 + '{}]')
    table = pa.table({'text': ['x' * 2000] * 300_000})
    options = pa.ipc.IpcWriteOptions(compression='zstd')
    with pa.OSFile(str(files['arrow']), 'wb') as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return files


def peak_bytes(process: psutil.Process) -> int:
    """Return the largest resident memory of a process so far."""
    lines = Path(f'/proc/{process.pid}/status').read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith('VmHWM'))


async def upload(service: RunningData, path: Path) -> dataset_pb2.DatasetSource:
    """Return a source that reads a file. The file is uploaded unless its format cannot be uploaded."""
    if path.suffix[1:] not in FORMATS:
        return dataset_pb2.DatasetSource(hub=dataset_pb2.HubSource(dataset_id=str(path)))
    content = await asyncio.to_thread(path.read_bytes)
    pieces = range(0, len(content), 1 << 20)
    chunks = [upload_chunk(begin, content[begin : begin + (1 << 20)]) for begin in pieces]
    parts = iterate([upload_header(path.name, len(content)), *chunks])
    assert (await service.datasets.Upload(parts, metadata=service.metadata)).is_complete
    file_format = FORMATS[path.suffix[1:]]
    return dataset_pb2.DatasetSource(upload=dataset_pb2.UploadSource(upload_id=path.name, format=file_format))


@pytest.mark.slow
async def test_memory_stays_bounded_while_hostile_files_are_refused(tmp_path: Path) -> None:
    """Files that decode to far more than the limit are refused, and the service's memory stays near the limit."""
    files = hostile_files(tmp_path)
    assert files['parquet'].stat().st_size < 100_000
    async with limited_process(tmp_path / 'state') as (service, process):
        await service.create(rows({'x': 1}))
        before = peak_bytes(process)
        for path in files.values():
            refused = await refusal_of(service.create(await upload(service, path)))
            assert (refused.code, refused.reason) == ('RESOURCE_EXHAUSTED', 'QUOTA_EXCEEDED'), path
        assert peak_bytes(process) - before < DATASET_BYTES + OVERHEAD_BYTES
        await service.create(rows({'x': 1}))
