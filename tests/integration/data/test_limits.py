"""Datasets, uploads, steps and exports above the limits of the data service are refused."""

from pathlib import Path

import pytest

from fixtures.data_service import CHECK, RunningData, iterate, map_with, refusal_of, rows, serving_data, upload_header
from fixtures.fake_model_scope import running_model_scope
from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import dataset_service_pb2 as wire


async def test_rows_above_a_limit_of_bytes_are_refused(tmp_path: Path) -> None:
    """Rows from a request, a step or a mixture that exceed a limit are refused, and their memory is released."""
    async with serving_data(tmp_path, dataset_bytes=50_000, decoded_bytes_per_tenant=60_000) as service:
        large, small = rows({'x': 'x' * 60_000}), rows({'query': 'q', 'response': '{{NAME}}' * 20})
        refused = await refusal_of(service.create(large))
        assert (refused.code, refused.reason) == ('RESOURCE_EXHAUSTED', 'QUOTA_EXCEEDED')
        dataset = await service.create(small)
        grown = map_with('SelfCognitionProcessor', model_name='m' * 3000, model_author='a')
        assert (await refusal_of(service.apply(dataset.dataset_id, grown))).reason == 'QUOTA_EXCEEDED'
        half = (await service.create(rows({'x': 'x' * 30_000}))).dataset_id
        twice = dataset_pb2.DatasetSource(mixture=dataset_pb2.MixtureSource(dataset_ids=[half, half]))
        assert (await refusal_of(service.create(twice))).reason == 'QUOTA_EXCEEDED'
        assert (await service.create(small)).row_count == 1


async def test_stored_bytes_and_uploads_are_limited(tmp_path: Path) -> None:
    """A tenant's stored datasets and uploads have limits in bytes; deleting a dataset frees space."""
    async with serving_data(tmp_path, stored_bytes=5000, upload_bytes=100) as service:
        source = rows({'x': 'x' * 3000})
        dataset = await service.create(source)
        assert (await refusal_of(service.create(source))).reason == 'QUOTA_EXCEEDED'
        assert (await service.as_tenant('bob').create(source)).row_count == 1
        request = wire.DeleteDatasetRequest(dataset_id=dataset.dataset_id)
        await service.datasets.DeleteDataset(request, metadata=service.metadata)
        assert (await service.create(source)).row_count == 1
        announced = iterate([upload_header('u', 101)])
        refused = await refusal_of(service.datasets.Upload(announced, metadata=service.metadata))
        assert refused.reason == 'QUOTA_EXCEEDED'


async def test_large_dataset_of_a_hub_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub dataset whose files exceed the limit of stored bytes is refused; the error names the field and the size."""
    for name in ('TWINKLE_CACHE_DIR', 'MODELSCOPE_CACHE', 'MODELSCOPE_HOME', 'HOME'):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.delenv('TWINKLE_HUB_DIR', raising=False)
    source = dataset_pb2.DatasetSource(hub=dataset_pb2.HubSource(dataset_id='ms://org/rows'))
    with running_model_scope() as hub:
        monkeypatch.setenv('MODELSCOPE_ENDPOINT', hub.url)
        hub.files['datasets/org/rows'] = {'train.jsonl': b'{"x": 1}\n', 'notes.txt': b'n' * 5000}
        async with serving_data(tmp_path, stored_bytes=5000) as service:
            refused = await refusal_of(service.create(source))
            assert (refused.code, refused.field) == ('INVALID_ARGUMENT', 'source.hub')
            assert '5009' in refused.message
        async with serving_data(tmp_path, stored_bytes=6000) as service:
            assert (await service.create(source)).row_count == 1


async def test_too_many_steps_or_arguments_are_refused_by_field(tmp_path: Path) -> None:
    """The error for too many steps, or for arguments that are too long, names the field."""
    async with serving_data(tmp_path) as service:
        await refuse_steps(service)


async def refuse_steps(service: RunningData) -> None:
    """Check that steps above the limits are refused."""
    source = rows({'query': 'q', 'response': 'r'})
    assert (await refusal_of(service.create(source, *[CHECK] * 1001))).field == 'steps'
    large = map_with('SelfCognitionProcessor', model_name='m' * (64 << 10), model_author='a')
    assert (await refusal_of(service.create(source, CHECK, large))).field.startswith('steps[1].map')


async def test_export_with_columns_is_limited(tmp_path: Path) -> None:
    """The memory limit applies to an export as CSV. Exports as JSON lines are written row by row, without the limit."""
    async with serving_data(tmp_path) as service:
        dataset = await service.create(rows(*({'x': 'x' * 1000} for _ in range(100))))
    async with serving_data(tmp_path, dataset_bytes=50_000) as service:
        csv, jsonl = (
            service.datasets.ExportDataset(
                wire.ExportDatasetRequest(dataset_id=dataset.dataset_id, format=file_format), metadata=service.metadata
            )
            for file_format in (dataset_pb2.FILE_FORMAT_CSV, dataset_pb2.FILE_FORMAT_JSONL)
        )
        assert (await refusal_of(csv)).reason == 'QUOTA_EXCEEDED'
        assert sum([len(part.chunk.data) async for part in jsonl]) > 100_000
