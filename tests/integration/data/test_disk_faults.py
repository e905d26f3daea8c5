"""If the disk refuses one system call, a request of the data service may fail, but all earlier data remain."""

import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from fixtures.data_service import (
    ENCODE,
    RunningData,
    chat,
    chats,
    iterate,
    new_request_id,
    refusal_of,
    rows,
    serving_data,
    set_template,
    upload_chunk,
    upload_header,
)
from fixtures.disk_faults import refusing
from fixtures.tiers import mostly_slow
from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import dataset_service_pb2 as wire
from twinkle.api.data.v1 import loader_service_pb2 as loader_wire

CONTENT = b'{"text": "one"}\n' * 20
UPLOADED = dataset_pb2.DatasetSource(
    upload=dataset_pb2.UploadSource(upload_id='u', format=dataset_pb2.FILE_FORMAT_JSONL)
)
TURNS = {'messages': [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]}
FILTER = dataset_pb2.DatasetStep(filter=dataset_pb2.FilterStep(filter='MessageSanityFilter'))
MAX_CALLS = 60
"""Upper bound of the number of disk calls in an action."""
ERRNOS = mostly_slow([errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EACCES], kept=2)

Attempt = Callable[[Awaitable[object]], Awaitable[bool]]
"""Runs an RPC while the disk refuses one system call, and returns whether the RPC succeeded."""

Action = Callable[..., Awaitable[None]]


@dataclass
class Stored:
    """Ids of the datasets and the loader that a service has stored before its disk refuses calls."""

    encoded: str
    loader: str
    raw: str

    async def content(self, service: RunningData) -> list[object]:
        """Return all stored content except uploads."""
        request = wire.ListDatasetsRequest(page_size=100)
        listed = await service.datasets.ListDatasets(request, metadata=service.metadata)
        described = sorted(dataset.SerializeToString(deterministic=True) for dataset in listed.datasets)
        return [*described, await service.read_all(self.loader), await export(service, self.raw)]


async def fill(service: RunningData, model: Path) -> Stored:
    """Store an encoded dataset with a loader, a raw dataset and an upload; return all ids except that of the upload."""
    answers = chats(*(chat('u', f'answer {index}') for index in range(3)))
    encoded = await service.create(answers, set_template(model), ENCODE)
    loader = await service.open(encoded.dataset_id, 2)
    raw = await service.create(rows({'x': 1}, {'x': 2}))
    await upload(service, 'u')
    return Stored(encoded.dataset_id, loader.loader_id, raw.dataset_id)


async def export(service: RunningData, dataset_id: str, file_format: int = dataset_pb2.FILE_FORMAT_JSONL) -> bytes:
    """Return a dataset as a file."""
    request = wire.ExportDatasetRequest(dataset_id=dataset_id, format=file_format)
    stream = service.datasets.ExportDataset(request, metadata=service.metadata)
    return b''.join([part.chunk.data async for part in stream])


async def upload(service: RunningData, upload_id: str) -> None:
    parts = [upload_header(upload_id, len(CONTENT)), upload_chunk(0, CONTENT)]
    await service.datasets.Upload(iterate(parts), metadata=service.metadata)


async def delete(service: RunningData, dataset_id: str) -> None:
    await service.datasets.DeleteDataset(wire.DeleteDatasetRequest(dataset_id=dataset_id), metadata=service.metadata)


async def creating(service: RunningData, _stored: Stored, attempt: Attempt) -> None:
    """Create a dataset from an upload; the repeated request succeeds, and there is one dataset."""
    request = wire.CreateDatasetRequest(request_id=new_request_id(), source=UPLOADED)
    await attempt(service.datasets.CreateDataset(request, metadata=service.metadata))
    created = await service.datasets.CreateDataset(request, metadata=service.metadata)
    await delete(service, created.dataset.dataset_id)


async def applying(service: RunningData, _stored: Stored, attempt: Attempt) -> None:
    """Change a dataset; the repeated request changes it once."""
    dataset = await service.create(rows(TURNS, {'messages': TURNS['messages'][1:]}))
    request = wire.ApplyRequest(request_id=new_request_id(), dataset_id=dataset.dataset_id, steps=[FILTER])
    await attempt(service.datasets.Apply(request, metadata=service.metadata))
    changed = (await service.datasets.Apply(request, metadata=service.metadata)).dataset
    assert (changed.row_count, len(changed.steps)) == (1, 1)
    assert (await export(service, dataset.dataset_id)).count(b'\n') == 1
    await delete(service, dataset.dataset_id)


async def deleting(service: RunningData, _stored: Stored, attempt: Attempt) -> None:
    """Delete a dataset; after a refusal it exists and can be deleted."""
    dataset = await service.create(rows({'x': 3}))
    if not await attempt(delete(service, dataset.dataset_id)):
        await delete(service, dataset.dataset_id)


async def opening(service: RunningData, stored: Stored, attempt: Attempt) -> None:
    """Open a loader; the repeated request succeeds, and there is one new loader."""
    request = loader_wire.OpenLoaderRequest(request_id=new_request_id(), dataset_id=stored.encoded, batch_size=3)
    await attempt(service.loaders.OpenLoader(request, metadata=service.metadata))
    opened = await service.loaders.OpenLoader(request, metadata=service.metadata)
    assert len(await service.read_all(opened.loader.loader_id)) == 1
    await close(service, opened.loader.loader_id)


async def closing(service: RunningData, stored: Stored, attempt: Attempt) -> None:
    """Close a loader; after a refusal it is open and can be closed."""
    loader = await service.open(stored.encoded, 3)
    if not await attempt(close(service, loader.loader_id)):
        assert len(await service.read_all(loader.loader_id)) == 1
        await close(service, loader.loader_id)


async def close(service: RunningData, loader_id: str) -> None:
    await service.loaders.CloseLoader(loader_wire.CloseLoaderRequest(loader_id=loader_id), metadata=service.metadata)


async def exporting(service: RunningData, _stored: Stored, attempt: Attempt) -> None:
    """Export a dataset; the repeated export has all rows."""
    dataset = await service.create(rows({'x': 3}))
    await attempt(export(service, dataset.dataset_id, dataset_pb2.FILE_FORMAT_CSV))
    assert await export(service, dataset.dataset_id, dataset_pb2.FILE_FORMAT_CSV) == b'"x"\n3\n'
    await delete(service, dataset.dataset_id)


async def reading(service: RunningData, stored: Stored, attempt: Attempt) -> None:
    """Read all batches of a loader."""
    await attempt(service.read_all(stored.loader))


async def mixing(service: RunningData, stored: Stored, attempt: Attempt) -> None:
    """Create a dataset from another dataset's rows; the repeated request succeeds."""
    mixture = dataset_pb2.DatasetSource(mixture=dataset_pb2.MixtureSource(dataset_ids=[stored.raw]))
    request = wire.CreateDatasetRequest(request_id=new_request_id(), source=mixture)
    await attempt(service.datasets.CreateDataset(request, metadata=service.metadata))
    created = await service.datasets.CreateDataset(request, metadata=service.metadata)
    await delete(service, created.dataset.dataset_id)


async def uploading(service: RunningData, _stored: Stored, attempt: Attempt) -> None:
    """Send a file; a second stream continues at the committed offset."""
    upload_id, service = 'v', service.as_tenant(new_request_id())
    await attempt(upload(service, upload_id))
    request = wire.GetUploadRequest(upload_id=upload_id)
    try:
        known = (await service.datasets.GetUpload(request, metadata=service.metadata)).committed_bytes
    except grpc.aio.AioRpcError:
        known = 0
    rest = [upload_chunk(known, CONTENT[known:])] if known < len(CONTENT) else []
    parts = [upload_header(upload_id, len(CONTENT)), *rest]
    assert (await service.datasets.Upload(iterate(parts), metadata=service.metadata)).is_complete
    source = dataset_pb2.UploadSource(upload_id=upload_id, format=dataset_pb2.FILE_FORMAT_JSONL)
    created = await service.create(dataset_pb2.DatasetSource(upload=source))
    assert created.row_count == 20
    await delete(service, created.dataset_id)


ACTIONS = [creating, applying, deleting, opening, closing, exporting, reading, mixing, uploading]


@pytest.mark.parametrize('action', ACTIONS)
@pytest.mark.parametrize('number', ERRNOS, ids=errno.errorcode.get)
async def test_refused_disk_call_has_no_lasting_effect(
    tmp_path: Path, tiny_llama_dir: Path, action: Action, number: int
) -> None:
    """If the disk refuses a system call, the action fails or succeeds, can be repeated, and loses no stored data."""
    model = {'base_models': (str(tiny_llama_dir),)}
    async with serving_data(tmp_path, **model) as service:
        stored = await fill(service, tiny_llama_dir)
        before = await stored.content(service)
    is_reached, after = True, 0
    while is_reached:
        async with serving_data(tmp_path, **model) as service:
            is_reached = await _run(action, service, stored, tmp_path, number=number, after=after)
            assert await stored.content(service) == before
        after += 1
        assert after < MAX_CALLS
    assert after > 1
    async with serving_data(tmp_path, **model) as service:
        assert await stored.content(service) == before
    assert [_count(tmp_path / 'data' / name) for name in ('datasets', 'loaders')] == [2, 1]


def _count(folder: Path) -> int:
    return len(list(folder.iterdir()))


async def _run(
    action: Callable[..., Awaitable[None]],
    service: RunningData,
    stored: Stored,
    folder: Path,
    *,
    number: int,
    after: int,
) -> bool:
    """Run an action on a disk that refuses one system call; return whether the action reached this system call."""
    is_reached = False

    async def attempt(call: Awaitable[object]) -> bool:
        nonlocal is_reached
        with refusing(folder, number=number, after=after) as faults:
            try:
                await call
            except grpc.aio.AioRpcError as error:
                refusal = await refusal_of(_raising(error))
            else:
                refusal = None
        is_reached = faults.is_reached
        permitted = [('UNAVAILABLE', 'STORE_UNAVAILABLE')]
        if number == errno.EIO:
            permitted.append(('DATA_LOSS', 'STORED_DATA_DAMAGED'))
        assert refusal is None or (refusal.code, refusal.reason) in permitted, refusal
        return refusal is None

    await action(service, stored, attempt)
    return is_reached


async def _raising(error: grpc.aio.AioRpcError) -> None:
    raise error
