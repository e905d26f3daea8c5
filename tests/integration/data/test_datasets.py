"""DatasetService over loopback: preparation of rows, uploads, exports, limits, and tenants."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.data_service import (
    CHECK,
    ENCODE,
    PACK,
    RunningData,
    chat,
    chats,
    iterate,
    map_with,
    new_request_id,
    refusal_of,
    rows,
    serving_data,
    set_template,
    upload_chunk,
    upload_header,
)
from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import dataset_service_pb2 as wire

IDENTITY_FILE = Path(__file__).parents[3] / 'examples/data/self_cognition.jsonl'


@pytest.fixture
async def service(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[RunningData]:
    """A service without datasets that may read the folders of the tiny model and of the examples."""
    fields = {'base_models': (str(tiny_llama_dir),), 'local_roots': (IDENTITY_FILE.parent,)}
    async with serving_data(tmp_path, **fields) as running:
        yield running


async def test_local_file_becomes_labelled_tokens(service: RunningData, tiny_llama_dir: Path) -> None:
    """One request can map and encode a file; the dataset lists the applied steps."""
    hub = dataset_pb2.HubSource(dataset_id=str(IDENTITY_FILE), end_row=10)
    mapped = map_with('SelfCognitionProcessor', model_name='Mina', model_author='us')
    source = dataset_pb2.DatasetSource(hub=hub)
    dataset = await service.create(source, mapped, set_template(tiny_llama_dir), ENCODE)
    assert (dataset.row_count, dataset.is_encoded) == (10, True)
    assert dataset.token_count > 300
    assert 'labels' in dataset.columns
    assert [step.WhichOneof('step') for step in dataset.steps] == ['map', 'set_template', 'encode']
    assert dataset.steps[1].set_template.max_length == 8192


async def test_quality_filters_report_dropped_rows(service: RunningData) -> None:
    """A filter, alone or in a pipeline, adds a warning about the rows that it dropped."""
    turns = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]
    source = rows({'messages': turns}, {'messages': turns}, {'messages': turns[1:]})
    pipeline = [{'name': 'DedupFilter', 'init_args': {'threshold': 1}}]
    sanity_filter = dataset_pb2.DatasetStep(filter=dataset_pb2.FilterStep(filter='MessageSanityFilter'))
    dataset = await service.create(source, sanity_filter, map_with('QualityPreprocessor', pipeline=pipeline))
    assert (dataset.row_count, len(dataset.warnings)) == (1, 2)


async def test_upload_resumes_at_the_committed_offset(service: RunningData) -> None:
    """An interrupted upload continues at the committed offset, and can be read only once it is complete."""
    content = IDENTITY_FILE.read_bytes()
    half = len(content) // 2
    first = iterate([upload_header('u', len(content)), upload_chunk(0, content[:half])])
    interrupted = await service.datasets.Upload(first, metadata=service.metadata)
    assert (interrupted.committed_bytes, interrupted.is_complete) == (half, False)
    source = dataset_pb2.DatasetSource(
        upload=dataset_pb2.UploadSource(upload_id='u', format=dataset_pb2.FILE_FORMAT_JSONL)
    )
    assert (await refusal_of(service.create(source))).field == 'source.upload.upload_id'
    status = await service.datasets.GetUpload(wire.GetUploadRequest(upload_id='u'), metadata=service.metadata)
    remaining = iterate([upload_header('u', len(content)), upload_chunk(status.committed_bytes, content[half:])])
    assert (await service.datasets.Upload(remaining, metadata=service.metadata)).is_complete
    assert (await service.create(source)).row_count == len(content.splitlines())


async def test_refused_chunk_keeps_earlier_bytes(service: RunningData) -> None:
    """A corrupt chunk or a chunk out of order is refused, and the bytes before it are kept."""
    head = upload_header('u', 10)
    corrupt = iterate([head, upload_chunk(0, b'abc'), upload_chunk(3, b'def', checksum=1)])
    refused = await refusal_of(service.datasets.Upload(corrupt, metadata=service.metadata))
    assert (refused.code, refused.reason) == ('DATA_LOSS', 'CHUNK_CORRUPT')
    early = iterate([head, upload_chunk(5, b'fgh')])
    refused = await refusal_of(service.datasets.Upload(early, metadata=service.metadata))
    assert (refused.code, refused.reason) == ('ABORTED', 'STREAM_OUT_OF_ORDER')
    status = await service.datasets.GetUpload(wire.GetUploadRequest(upload_id='u'), metadata=service.metadata)
    assert status.committed_bytes == 3


@pytest.mark.parametrize(
    ('parts', 'field'),
    [
        ([upload_header('', 1)], 'header.upload_id'),
        ([upload_header('u', -1)], 'header.size_bytes'),
        ([upload_header('u', 1 << 62)], 'header.size_bytes'),
        ([upload_header('u', 2), upload_chunk(0, b'abc')], 'chunk.data'),
        ([upload_header('u', 2), upload_chunk(0, b'')], 'chunk.data'),
        ([wire.UploadRequest()], 'part'),
    ],
)
async def test_malformed_upload_is_refused_by_field(service: RunningData, parts: list[Any], field: str) -> None:
    """A stream with an invalid field is refused with the path of that field."""
    refused = await refusal_of(service.datasets.Upload(iterate(parts), metadata=service.metadata))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', field)


async def test_repeated_request_returns_the_first_answer(service: RunningData, tiny_llama_dir: Path) -> None:
    """A repeated request returns the first answer; the same request id with other content is refused."""
    request = wire.CreateDatasetRequest(request_id='r', source=chats(chat('a', 'b')))
    first, second = [await service.datasets.CreateDataset(request, metadata=service.metadata) for _ in range(2)]
    assert first == second
    request.steps.append(set_template(tiny_llama_dir))
    refused = await refusal_of(service.datasets.CreateDataset(request, metadata=service.metadata))
    assert (refused.code, refused.reason) == ('ABORTED', 'REQUEST_ID_REUSED')
    apply = wire.ApplyRequest(
        request_id='s', dataset_id=first.dataset.dataset_id, steps=[set_template(tiny_llama_dir), ENCODE]
    )
    once, twice = [await service.datasets.Apply(apply, metadata=service.metadata) for _ in range(2)]
    assert once == twice
    del apply.steps[-1]
    assert (await refusal_of(service.datasets.Apply(apply, metadata=service.metadata))).reason == 'REQUEST_ID_REUSED'


async def test_either_all_steps_are_applied_or_none(service: RunningData, tiny_llama_dir: Path) -> None:
    """If one step of a request fails, the dataset does not change."""
    dataset = await service.create(rows({'query': 'q', 'response': 'r'}, {'query': 'q', 'response': 's'}))
    mapped = map_with('SelfCognitionProcessor', model_name='a', model_author='b')
    refused = await refusal_of(service.apply(dataset.dataset_id, mapped, ENCODE))
    assert (refused.code, refused.reason) == ('FAILED_PRECONDITION', 'DATASET_NOT_READY')
    request = wire.GetDatasetRequest(dataset_id=dataset.dataset_id)
    assert (await service.datasets.GetDataset(request, metadata=service.metadata)).dataset == dataset
    changed = await service.apply(dataset.dataset_id, mapped, set_template(tiny_llama_dir), ENCODE, PACK)
    assert (changed.row_count, len(changed.steps)) == (1, 4)


async def test_malformed_chat_is_refused_by_row_and_field(service: RunningData, tiny_llama_dir: Path) -> None:
    """Chats in rows are checked when they are encoded, and chats in a request when the request arrives."""
    good = [{'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': 'a'}]
    bad = [good[0], {'role': 'robot', 'content': 'a'}]
    source = rows(*({'messages': messages} for messages in (good, good, good, bad)))
    refused = await refusal_of(service.create(source, set_template(tiny_llama_dir), ENCODE))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', 'rows[3].messages[1].role')
    broken = chat('a', 'b')
    broken.messages[1].role = 0
    refused = await refusal_of(service.create(chats(chat('a', 'b'), broken)))
    assert refused.field == 'source.trajectories.trajectories[1].messages[1].role'
    assert not (await service.datasets.ListDatasets(wire.ListDatasetsRequest(), metadata=service.metadata)).datasets


async def test_too_long_row_is_named(service: RunningData, tiny_llama_dir: Path) -> None:
    """RAISE refuses a row that is too long and reports its index; DELETE removes the row with a warning."""
    source = chats(chat('a', 'b'), chat('a', 'b' * 200))
    refused = await refusal_of(service.create(source, set_template(tiny_llama_dir, max_length=100), ENCODE))
    assert refused.field == 'rows[1]'
    strategy = dataset_pb2.TRUNCATION_STRATEGY_DELETE
    step = set_template(tiny_llama_dir, max_length=100, truncation_strategy=strategy)
    dataset = await service.create(source, step, ENCODE)
    assert dataset.row_count == 1
    assert dataset.warnings[0].startswith('1 of 2 examples were left out')


async def test_check_adds_warnings_without_changing_rows(service: RunningData, tiny_llama_dir: Path) -> None:
    """A check warns about rows that do not contribute to training, before and after encoding."""
    source = chats(chat('a', 'b'), chat('a'))
    dataset = await service.create(source, set_template(tiny_llama_dir), CHECK, ENCODE, CHECK)
    assert dataset.row_count == 2
    assert [warning.split(':')[0] for warning in dataset.warnings if warning.startswith('rows')] == ['rows[1]'] * 2


async def test_mixture_alternates_between_its_parts(service: RunningData, tiny_llama_dir: Path) -> None:
    """A mixture alternates between datasets of its tenant; datasets of another tenant are not found."""
    first = await service.create(rows({'x': 1}, {'x': 2}, {'x': 3}))
    second = await service.create(rows({'x': 10}))
    ids = [first.dataset_id, second.dataset_id]
    mixture = dataset_pb2.MixtureSource(dataset_ids=ids, is_interleaved=True)
    mixed = await service.create(dataset_pb2.DatasetSource(mixture=mixture))
    exported = await export(service, mixed.dataset_id)
    assert [json.loads(line)['x'] for line in exported.splitlines()] == [1, 10, 2, 3]
    foreign = service.as_tenant('bob').create(dataset_pb2.DatasetSource(mixture=mixture))
    assert (await refusal_of(foreign)).reason == 'DATASET_NOT_FOUND'


async def test_export_resumes_at_an_offset(service: RunningData) -> None:
    """An export returns the same bytes from any offset; an unset format, or an offset after the end, is refused."""
    dataset = await service.create(rows(*({'text': f'{i}' * 1000} for i in range(1500))))
    whole = await export(service, dataset.dataset_id)
    assert len(whole) > 1 << 20
    assert await export(service, dataset.dataset_id, offset=1000) == whole[1000:]
    parquet = await export(service, dataset.dataset_id, file_format=dataset_pb2.FILE_FORMAT_PARQUET)
    assert parquet[:4] == b'PAR1'
    for field, values in {'format': {'format': 0}, 'offset': {'format': 1, 'offset': len(whole) + 1}}.items():
        request = wire.ExportDatasetRequest(dataset_id=dataset.dataset_id, **values)
        refused = await refusal_of(service.datasets.ExportDataset(request, metadata=service.metadata))
        assert (refused.code, refused.field) == ('INVALID_ARGUMENT', field)


async def test_refused_export_stores_nothing(service: RunningData, tmp_path: Path) -> None:
    """An export at an offset after the end leaves no file, and keeps the file of an earlier export."""
    dataset = await service.create(rows({'x': 1}))
    request = wire.ExportDatasetRequest(dataset_id=dataset.dataset_id, format=1, offset=1 << 40)
    for kept in ([], ['export.jsonl']):
        assert (await refusal_of(service.datasets.ExportDataset(request, metadata=service.metadata))).field == 'offset'
        assert _exported_files(tmp_path) == kept
        await export(service, dataset.dataset_id)


def _exported_files(folder: Path) -> list[str]:
    """Return the names of all exported files below a folder, complete or not."""
    return [path.name for path in folder.rglob('*export*')]


async def export(service: RunningData, dataset_id: str, *, file_format: int = 1, offset: int = 0) -> bytes:
    """Return an exported file after checking that its pieces are consecutive."""
    request = wire.ExportDatasetRequest(dataset_id=dataset_id, format=file_format, offset=offset)
    content = b''
    async for piece in service.datasets.ExportDataset(request, metadata=service.metadata):
        assert piece.chunk.offset == offset + len(content)
        content += piece.chunk.data
    return content


async def test_list_pages_newest_first(service: RunningData) -> None:
    """Pages contain every dataset once, newest first, and their tokens are valid for one tenant only."""
    created = [(await service.create(rows({'x': i}))).dataset_id for i in range(5)]
    seen: list[str] = []
    request = wire.ListDatasetsRequest(page_size=2)
    while True:
        page = await service.datasets.ListDatasets(request, metadata=service.metadata)
        seen += [dataset.dataset_id for dataset in page.datasets]
        request.page_token = page.next_page_token
        if not page.next_page_token:
            break
    assert sorted(seen) == sorted(created)
    assert seen == sorted(created, reverse=True)
    bob = service.as_tenant('bob')
    assert not (await bob.datasets.ListDatasets(wire.ListDatasetsRequest(), metadata=bob.metadata)).datasets
    own_page = await service.datasets.ListDatasets(wire.ListDatasetsRequest(page_size=1), metadata=service.metadata)
    request = wire.ListDatasetsRequest(page_token=own_page.next_page_token)
    assert (await refusal_of(bob.datasets.ListDatasets(request, metadata=bob.metadata))).reason == 'INVALID_PAGE_TOKEN'


async def test_resources_of_another_tenant_are_not_found(service: RunningData) -> None:
    """The errors for another tenant's dataset and an absent dataset are equal; another tenant's upload is not found."""
    dataset = await service.create(rows({'x': 1}))
    parts = iterate([upload_header('u', 1), upload_chunk(0, b'x')])
    await service.datasets.Upload(parts, metadata=service.metadata)
    bob = service.as_tenant('bob')
    for dataset_id in (dataset.dataset_id, 'ds-nothing'):
        calls = [
            bob.datasets.GetDataset(wire.GetDatasetRequest(dataset_id=dataset_id), metadata=bob.metadata),
            bob.datasets.DeleteDataset(wire.DeleteDatasetRequest(dataset_id=dataset_id), metadata=bob.metadata),
            bob.apply(dataset_id, CHECK),
            bob.open(dataset_id, 1),
            bob.datasets.ExportDataset(
                wire.ExportDatasetRequest(dataset_id=dataset_id, format=1), metadata=bob.metadata
            ),
        ]
        refused = [await refusal_of(call) for call in calls]
        assert {(item.code, item.reason) for item in refused} == {('NOT_FOUND', 'DATASET_NOT_FOUND')}
        assert {item.message for item in refused} == {f"no dataset '{dataset_id}'"}
    upload = await refusal_of(bob.datasets.GetUpload(wire.GetUploadRequest(upload_id='u'), metadata=bob.metadata))
    assert (upload.code, upload.reason) == ('NOT_FOUND', 'UPLOAD_NOT_FOUND')


async def test_key_without_the_scope_is_refused(service: RunningData) -> None:
    """A key with only the scope `sample` cannot use datasets or loaders."""
    sampler = service.as_tenant('alice', scopes='sample')
    refused = [
        await refusal_of(sampler.create(rows({'x': 1}))),
        await refusal_of(sampler.datasets.ListDatasets(wire.ListDatasetsRequest(), metadata=sampler.metadata)),
        await refusal_of(sampler.open('ds-x', 1)),
    ]
    assert {(item.code, item.reason) for item in refused} == {('PERMISSION_DENIED', 'SCOPE_MISSING')}


def creation(**fields: Any) -> wire.CreateDatasetRequest:
    """Return a valid request with the given fields replaced."""
    return wire.CreateDatasetRequest(**{'request_id': new_request_id(), 'source': rows({'x': 1}), **fields})


def step(**fields: Any) -> list[dataset_pb2.DatasetStep]:
    return [dataset_pb2.DatasetStep(**fields)]


def source(**fields: Any) -> dataset_pb2.DatasetSource:
    return dataset_pb2.DatasetSource(**fields)


MISNAMED = {'max_length': 'x', 'model_name': 'a', 'model_author': 'b'}


@pytest.mark.parametrize(
    ('request_', 'field'),
    [
        (creation(request_id=''), 'request_id'),
        (creation(source=None), 'source'),
        (creation(source=rows()), 'source.rows.rows'),
        (creation(source=rows({'x': 1}, {'y': 1})), 'source.rows.rows[1]'),
        (creation(source=chats()), 'source.trajectories.trajectories'),
        (creation(source=chats(chat())), 'source.trajectories.trajectories[0].messages'),
        (creation(source=source(hub=dataset_pb2.HubSource())), 'source.hub.dataset_id'),
        (creation(source=source(hub=dataset_pb2.HubSource(dataset_id='x', begin_row=-1))), 'source.hub.begin_row'),
        (
            creation(source=source(hub=dataset_pb2.HubSource(dataset_id='x', begin_row=3, end_row=3))),
            'source.hub.end_row',
        ),
        (creation(source=source(upload=dataset_pb2.UploadSource(upload_id='u'))), 'source.upload.format'),
        (creation(source=source(upload=dataset_pb2.UploadSource(format=1))), 'source.upload.upload_id'),
        (creation(source=source(mixture=dataset_pb2.MixtureSource())), 'source.mixture.dataset_ids'),
        (creation(steps=step()), 'steps[0]'),
        (creation(steps=[map_with('Nothing')]), 'steps[0].map.preprocessor'),
        (creation(steps=[map_with('SelfCognitionProcessor', **MISNAMED)]), 'steps[0].map.init_args'),
        (creation(steps=[map_with('SelfCognitionProcessor', model_name=1, model_author='')]), 'steps[0].map.init_args'),
        (creation(steps=step(filter=dataset_pb2.FilterStep(filter='Nothing'))), 'steps[0].filter.filter'),
        (creation(steps=[set_template('')]), 'steps[0].set_template.base_model'),
        (creation(steps=[set_template('m', max_length=0)]), 'steps[0].set_template.max_length'),
        (creation(steps=[set_template('m', name='Nothing')]), 'steps[0].set_template.name'),
        (creation(steps=[set_template('m', truncation_strategy=9)]), 'steps[0].set_template.truncation_strategy'),
        (creation(steps=[map_with('AlpacaProcessor')]), 'rows[0].instruction'),
    ],
)
async def test_invalid_creation_is_refused_by_field(
    service: RunningData, request_: wire.CreateDatasetRequest, field: str
) -> None:
    """A request with an invalid field is refused with the path of that field, and creates nothing."""
    refused = await refusal_of(service.datasets.CreateDataset(request_, metadata=service.metadata))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', field)
    assert not (await service.datasets.ListDatasets(wire.ListDatasetsRequest(), metadata=service.metadata)).datasets


@pytest.mark.parametrize('path', ['/etc/passwd', './pyproject.toml', '../x', 'ftp://a/b'])
async def test_paths_outside_the_roots_are_not_found(service: RunningData, path: str) -> None:
    """A caller cannot read or detect the service's files, as a dataset or as a model."""
    hub = await refusal_of(service.create(source(hub=dataset_pb2.HubSource(dataset_id=path))))
    assert (hub.code, hub.reason) == ('NOT_FOUND', 'HUB_ID_NOT_FOUND')
    model = await refusal_of(service.create(rows({'x': 1}), set_template(path)))
    assert (model.code, model.reason) == ('NOT_FOUND', 'HUB_ID_NOT_FOUND')


async def test_unreadable_upload_is_refused(service: RunningData) -> None:
    """A file that does not have the stated format is refused, and the error names the field of the upload."""
    parts = iterate([upload_header('u', 10), upload_chunk(0, b'{"a": 1}\n{')])
    await service.datasets.Upload(parts, metadata=service.metadata)
    for file_format in (1, 2):
        upload = dataset_pb2.UploadSource(upload_id='u', format=file_format)
        refused = await refusal_of(service.create(source(upload=upload)))
        assert (refused.code, refused.field) == ('INVALID_ARGUMENT', 'source.upload')


async def test_datasets_survive_a_restart(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Datasets and their request ids survive a restart, which removes the incomplete datasets of a crash."""
    fields = {'base_models': (str(tiny_llama_dir),)}
    request = wire.CreateDatasetRequest(
        request_id='r', source=chats(chat('a', 'b')), steps=[set_template(tiny_llama_dir)]
    )
    async with serving_data(tmp_path, **fields) as service:
        dataset = (await service.datasets.CreateDataset(request, metadata=service.metadata)).dataset
    incomplete = tmp_path / 'data/datasets/ds-crash/revision-1'
    incomplete.mkdir(parents=True)
    async with serving_data(tmp_path, **fields) as service:
        repeated = (await service.datasets.CreateDataset(request, metadata=service.metadata)).dataset
        assert repeated == dataset
        assert (await service.apply(dataset.dataset_id, ENCODE)).is_encoded
    assert not incomplete.exists()


async def test_deletion_removes_the_rows(service: RunningData, tmp_path: Path) -> None:
    """A deleted dataset is not found, and its files are removed."""
    dataset = await service.create(rows({'x': 1}))
    request = wire.DeleteDatasetRequest(dataset_id=dataset.dataset_id)
    await service.datasets.DeleteDataset(request, metadata=service.metadata)
    refused = await refusal_of(service.datasets.DeleteDataset(request, metadata=service.metadata))
    assert refused.reason == 'DATASET_NOT_FOUND'
    assert list((tmp_path / 'data/datasets').iterdir()) == []


async def test_exceeded_quotas_are_refused(tmp_path: Path) -> None:
    """A dataset with too many rows, or above the number of allowed datasets, is refused and not stored."""
    async with serving_data(tmp_path, row_limit=2, dataset_limit=1) as service:
        refused = await refusal_of(service.create(rows(*({'x': i} for i in range(3)))))
        assert (refused.code, refused.reason) == ('RESOURCE_EXHAUSTED', 'QUOTA_EXCEEDED')
        await service.create(rows({'x': 1}))
        assert (await refusal_of(service.create(rows({'x': 1})))).reason == 'QUOTA_EXCEEDED'
        assert (await service.as_tenant('bob').create(rows({'x': 1}))).row_count == 1
