"""Damage to stored datasets, loaders and uploads is reported by the affected calls, or has no effect."""

import shutil
from pathlib import Path

import grpc
import pytest

from fixtures.damage import apply, damages_below
from fixtures.data_service import (
    ENCODE,
    RunningData,
    chat,
    chats,
    iterate,
    refusal_of,
    serving_data,
    set_template,
    upload_chunk,
    upload_header,
)
from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import dataset_service_pb2 as wire

CONTENT = b'{"text": "one"}\n{"text": "two"}\n' * 20
UPLOADED = dataset_pb2.DatasetSource(
    upload=dataset_pb2.UploadSource(upload_id='u', format=dataset_pb2.FILE_FORMAT_JSONL)
)


async def _fill(service: RunningData, model: Path) -> dict[str, str]:
    """Store an encoded dataset with a loader, an upload, and a raw dataset with an export; return the ids by name."""
    encoded = await service.create(chats(*(chat('u', f'answer {i}') for i in range(6))), set_template(model), ENCODE)
    await service.datasets.Upload(
        iterate([upload_header('u', len(CONTENT)), upload_chunk(0, CONTENT)]), metadata=service.metadata
    )
    raw = await service.create(UPLOADED)
    loader = await service.open(encoded.dataset_id, 2)
    await _export(service, raw.dataset_id)
    return {'encoded': encoded.dataset_id, 'raw': raw.dataset_id, 'loader': loader.loader_id}


async def _export(service: RunningData, dataset_id: str) -> bytes:
    request = wire.ExportDatasetRequest(dataset_id=dataset_id, format=dataset_pb2.FILE_FORMAT_JSONL)
    return b''.join(
        [part.chunk.data async for part in service.datasets.ExportDataset(request, metadata=service.metadata)]
    )


async def _content(service: RunningData, ids: dict[str, str]) -> list[object]:
    """Return all acknowledged content, with 'damaged' for each part that is reported as damaged."""

    async def description(dataset_id: str) -> bytes:
        request = wire.GetDatasetRequest(dataset_id=dataset_id)
        found = await service.datasets.GetDataset(request, metadata=service.metadata)
        return found.dataset.SerializeToString(deterministic=True)

    async def uploaded() -> int:
        return (await service.create(UPLOADED)).row_count

    calls = [
        lambda: description(ids['encoded']),
        lambda: description(ids['raw']),
        lambda: service.read_all(ids['loader']),
        lambda: _export(service, ids['raw']),
        uploaded,
    ]
    found: list[object] = []
    for call in calls:
        try:
            found.append(await call())
        except grpc.aio.AioRpcError as error:
            refusal = await refusal_of(_raising(error))
            found.append('damaged' if refusal.reason == 'STORED_DATA_DAMAGED' else f'{error.code()} {refusal.reason}')
    return found


async def _raising(error: grpc.aio.AioRpcError) -> None:
    raise error


@pytest.mark.slow
async def test_damage_to_any_stored_file_is_reported_or_has_no_effect(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """If any stored file is damaged, calls that need the file report the damage or return the stored content."""
    model = {'base_models': (str(tiny_llama_dir),)}
    stopped, work = tmp_path / 'stopped', tmp_path / 'work'
    async with serving_data(stopped, **model) as service:
        ids = await _fill(service, tiny_llama_dir)
        undamaged = await _content(service, ids)
    assert 'damaged' not in undamaged
    for path, damage, content in damages_below(stopped, flips=3):
        if content is None and path.suffix == '.json':
            # A resource without its record or header cannot be distinguished from a deleted or expired resource.
            continue
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(stopped, work)
        apply(work / path, content)
        async with serving_data(work, **model) as service:
            found = await _content(service, ids)
        case = f'{path}: {damage}'
        assert all(part in ('damaged', whole) for part, whole in zip(found, undamaged, strict=True)), case


@pytest.mark.parametrize('name', ['record.json', 'revision-1/rows.jsonl', 'revision-1/row_offsets.npy'])
async def test_damaged_dataset_can_be_deleted_by_its_owner(tmp_path: Path, name: str) -> None:
    """A dataset with a damaged file can be deleted only by its tenant; afterwards, it is not found."""
    async with serving_data(tmp_path) as service:
        dataset_id = (await service.create(chats(chat('u', 'a')))).dataset_id
    path = tmp_path / 'data' / 'datasets' / dataset_id / name
    path.write_bytes(path.read_bytes()[:-3])
    request = wire.DeleteDatasetRequest(dataset_id=dataset_id)
    async with serving_data(tmp_path) as service:
        other = service.as_tenant('bob')
        reading = wire.GetDatasetRequest(dataset_id=dataset_id)
        for call in (
            other.datasets.DeleteDataset(request, metadata=other.metadata),
            other.datasets.GetDataset(reading, metadata=other.metadata),
        ):
            assert (await refusal_of(call)).reason == 'DATASET_NOT_FOUND'
        assert path.exists()
        await service.datasets.DeleteDataset(request, metadata=service.metadata)
        assert not path.parent.exists()
        again = await refusal_of(service.datasets.DeleteDataset(request, metadata=service.metadata))
        assert again.reason == 'DATASET_NOT_FOUND'


def _overwrite(state_dir: Path, content: bytes) -> None:
    (path,) = state_dir.glob('data/uploads/*/*/bytes')
    path.write_bytes(content)


async def test_damaged_upload_is_received_again(tmp_path: Path) -> None:
    """A stream that continues a damaged upload is refused; then the upload can be sent again from byte 0."""
    half = len(CONTENT) // 2
    async with serving_data(tmp_path) as service:
        first = iterate([upload_header('u', len(CONTENT)), upload_chunk(0, CONTENT[:half])])
        assert (await service.datasets.Upload(first, metadata=service.metadata)).committed_bytes == half
        _overwrite(tmp_path, b'x' * half)
        rest = iterate([upload_header('u', len(CONTENT)), upload_chunk(half, CONTENT[half:])])
        assert (await refusal_of(service.datasets.Upload(rest, metadata=service.metadata))).reason
        whole = iterate([upload_header('u', len(CONTENT)), upload_chunk(0, CONTENT)])
        assert (await service.datasets.Upload(whole, metadata=service.metadata)).is_complete
        assert (await service.create(UPLOADED)).row_count == 40
