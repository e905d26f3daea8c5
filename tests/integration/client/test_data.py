"""Datasets and data loaders: resumable uploads, dataset steps, and exact cursors."""

import asyncio
from io import BytesIO
from pathlib import Path

import datasets
import grpc
import pyarrow.parquet as pq
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import failure
from twinkle.api.data.v1 import dataset_pb2
from twinkle_client import TwinkleClient, UsageError
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta, IterableDataset, IterablePackingDataset, LazyDataset

UNREACHABLE = failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE', retry_seconds=0.01)


async def test_rows_in_memory_are_uploaded_unchanged(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Rows in memory are uploaded as JSON lines; integers are not converted, and only the slice is uploaded."""
    meta = DatasetMeta(data=[{'n': 1}, {'n': 2}, {'n': 3}], data_slice=range(2))
    await Dataset(meta, client=client).describe.aio()
    source = gateway.calls['CreateDataset'][0].source
    assert source.upload.format == dataset_pb2.FILE_FORMAT_JSONL
    assert gateway.uploads[source.upload.upload_id] == b'{"n": 1}\n{"n": 2}\n'


async def test_interrupted_upload_is_resumed(gateway: FakeGateway, client: TwinkleClient, tmp_path: Path) -> None:
    """An interrupted upload resumes after the last stored byte."""
    path = tmp_path / 'rows.csv'
    path.write_bytes(b'a,b\n' + b'1,2\n' * 700_000)
    gateway.fail('AfterUploadChunk', UNREACHABLE)
    await Dataset(str(path), client=client).describe.aio()
    assert next(iter(gateway.uploads.values())) == path.read_bytes()
    assert len(gateway.calls['Upload']) == 2


async def test_hub_id_and_slice_are_sent(gateway: FakeGateway, client: TwinkleClient) -> None:
    """An id that is not a local file is sent as a hub id, with its slice of rows."""
    await Dataset(DatasetMeta('ms://swift/self-cognition', data_slice=range(500)), client=client).describe.aio()
    hub = gateway.calls['CreateDataset'][0].source.hub
    assert (hub.dataset_id, hub.split, hub.begin_row, hub.end_row) == ('ms://swift/self-cognition', 'train', 0, 500)


async def test_steps_are_sent_in_order(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Each method that prepares a dataset is sent as one step with its arguments."""
    dataset = Dataset('org/name', client=client)
    await dataset.set_template.aio('Template', model_id='tiny', max_length=64, truncation_strategy='right')
    await dataset.map.aio('SelfCognitionProcessor', init_args={'model_name': 'a'}, load_from_cache_file=False)
    await dataset.encode.aio(batched=True)
    steps = [request.steps[0] for request in gateway.calls['Apply']]
    assert [step.WhichOneof('step') for step in steps] == ['set_template', 'map', 'encode']
    assert steps[0].set_template.truncation_strategy == dataset_pb2.TRUNCATION_STRATEGY_RIGHT
    assert steps[1].map.init_args['model_name'] == 'a'


async def test_preprocessor_object_becomes_name_and_arguments(gateway: FakeGateway, client: TwinkleClient) -> None:
    """An object whose arguments can be read from its attributes is sent as class name and arguments."""

    class SelfCognitionProcessor:
        def __init__(self, model_name: str, model_author: str = '') -> None:
            self._model_name = model_name
            self.model_author = model_author

    await Dataset('org/name', client=client).map.aio(SelfCognitionProcessor('twinkle', 'us'))
    step = gateway.calls['Apply'][0].steps[0].map
    assert step.preprocessor == 'SelfCognitionProcessor'
    assert dict(step.init_args) == {'model_name': 'twinkle', 'model_author': 'us'}


async def test_function_is_refused(client: TwinkleClient) -> None:
    """A function is refused, because code is not sent; the error names an alternative."""
    with pytest.raises(TypeError, match='name'):
        await Dataset('org/name', client=client).map.aio(lambda row: row)


async def test_every_row_is_delivered_once_despite_an_interruption(gateway: FakeGateway, client: TwinkleClient) -> None:
    """An interrupted stream is reopened after the last received batch."""
    loader = DataLoader(Dataset('org/name', client=client), batch_size=3)
    gateway.fail('AfterBatch', UNREACHABLE)
    batches = [[int(feature['input_ids'][0]) for feature in batch] async for batch in loader]
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [start.cursor.consumed_rows for start in gateway.calls['StreamStart']] == [0, 3]


async def test_resumed_loader_continues_after_the_last_batch(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A state from between two batches makes another loader resume at the next batch."""
    loader = DataLoader(Dataset('org/name', client=client), batch_size=4)
    async for _ in loader:
        state = loader.get_state()
        break
    assert state['consumed_train_samples'] == 4
    resumed = DataLoader(Dataset('org/name', client=client), batch_size=4)
    resumed.resume_from_checkpoint(state)
    batches = [[int(feature['input_ids'][0]) for feature in batch] async for batch in resumed]
    assert batches == [[4, 5, 6, 7], [8, 9]]
    assert gateway.calls['StreamStart'][-1].cursor.state == b'\x07'


async def test_loader_resumes_from_a_row_count(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The number of consumed rows is enough to resume; an invalid state is refused."""
    loader = DataLoader(Dataset('org/name', client=client), batch_size=4)
    loader.resume_from_checkpoint(8)
    assert [[int(feature['input_ids'][0]) for feature in batch] async for batch in loader] == [[8, 9]]
    assert gateway.calls['StreamStart'][-1].cursor.state == b''
    for invalid in (-1, 'many', {'consumed_train_samples': 4}):
        with pytest.raises(ValueError, match='must be'):
            loader.resume_from_checkpoint(invalid)


async def test_handles_identify_the_batches(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Handles identify all batches, or the batches after a given state, without reading them."""
    loader = DataLoader(Dataset('org/name', client=client), batch_size=4, epochs=2)
    handles = [handle async for handle in loader.handles.aio()]
    assert [(handle.consumed_rows, len(handle)) for handle in handles] == [
        (0, 4), (4, 4), (8, 2), (10, 4), (14, 4), (18, 2),
    ]  # fmt: skip
    assert loader.get_state() == {'consumed_train_samples': 20, 'cursor': ''}
    loader.resume_from_checkpoint({'consumed_train_samples': 14, 'cursor': 'Bw=='})
    assert loader.get_state() == {'consumed_train_samples': 14, 'cursor': 'Bw=='}
    resumed = [handle async for handle in loader.handles.aio()]
    assert [(handle.consumed_rows, handle.cursor_state) for handle in resumed] == [(14, b'\x07'), (18, b'')]
    assert await loader.batch_at.aio(10) == handles[3]
    assert 'StreamStart' not in gateway.calls


async def test_handles_exclude_dropped_batches(client: TwinkleClient) -> None:
    """Incomplete last batches have no handles with `drop_last`, and `batch_at` refuses a position without a batch."""
    loader = DataLoader(Dataset('org/name', client=client), batch_size=4, epochs=0, drop_last=True)
    handles = loader.handles.aio()
    assert [(await anext(handles)).consumed_rows for _ in range(4)] == [0, 4, 8, 12]
    await handles.aclose()
    empty = DataLoader(Dataset('org/name', client=client), batch_size=11, drop_last=True)
    assert [handle async for handle in empty.handles.aio()] == []
    with pytest.raises(ValueError, match='no batches'):
        await empty.batch_at.aio(0)
    with pytest.raises(ValueError, match='at least 0'):
        await loader.batch_at.aio(-1)


async def test_batches_of_prompts_have_no_handles(client: TwinkleClient) -> None:
    """A loader of rows that are encoded for sampling has no batch handles."""
    dataset = Dataset('org/name', client=client)
    await dataset.encode.aio(add_generation_prompt=True)
    with pytest.raises(ValueError, match='sampling'):
        await DataLoader(dataset).batch_at.aio(0)


async def test_hugging_face_datasets_keep_their_types(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Tables, slices of tables and splits are uploaded as Parquet, and streams as JSON lines."""
    table = datasets.Dataset.from_list([{'n': number, 'b': b'\x00'} for number in range(4)])
    sources: list[DatasetMeta] = [
        DatasetMeta(data=table, data_slice=slice(1, 3)),
        DatasetMeta(data=datasets.DatasetDict(test=table), split='test', data_slice=[2, 0, 9]),
    ]
    numbers = []
    for meta in sources:
        await Dataset(meta, client=client).describe.aio()
        upload = gateway.calls['CreateDataset'][-1].source.upload
        assert upload.format == dataset_pb2.FILE_FORMAT_PARQUET
        numbers.append(pq.read_table(BytesIO(gateway.uploads[upload.upload_id]))['n'].to_pylist())
    assert numbers == [[1, 2], [2, 0]]
    stream = table.select_columns(['n']).to_iterable_dataset()
    await Dataset(DatasetMeta(data=stream, data_slice=range(2)), client=client).describe.aio()
    upload = gateway.calls['CreateDataset'][-1].source.upload
    assert gateway.uploads[upload.upload_id] == b'{"n": 0}\n{"n": 1}\n'
    with pytest.raises(ValueError, match='train'):
        await Dataset(DatasetMeta(data=datasets.DatasetDict(test=table)), client=client).describe.aio()


async def test_lazy_and_streamed_datasets_are_requested_as_such(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Only a lazy dataset is requested with `is_lazy`, and only a streamed dataset with `is_streamed`."""
    dataset = LazyDataset('org/name', client=client)
    await dataset.encode.aio()
    await Dataset('org/name', client=client).describe.aio()
    await IterablePackingDataset('org/name', client=client).pack_dataset.aio()
    requests = gateway.calls['CreateDataset']
    assert [request.is_lazy for request in requests] == [True, False, False]
    assert [request.is_streamed for request in requests] == [False, False, True]


async def test_streamed_datasets_refuse_what_needs_their_rows(client: TwinkleClient, tmp_path: Path) -> None:
    """Rows, files, lengths, and handles whose last batch is unknown are refused before any call."""
    dataset = IterableDataset('org/name', client=client)
    for meta in (DatasetMeta(data=[{'x': 1}]), str(tmp_path / 'rows.jsonl')):
        with pytest.raises(ValueError, match='streamed'):
            await IterableDataset(meta, client=client).describe.aio()
    for sized in (dataset, DataLoader(dataset)):
        with pytest.raises(TypeError, match='unknown'):
            len(sized)
    with pytest.raises(ValueError, match='drop_last'):
        await anext(DataLoader(dataset).handles.aio())


async def test_handles_of_a_stream_have_full_batches(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Handles of a streamed dataset continue without end, and a position continues from a checkpoint."""
    loader = DataLoader(IterableDataset('org/name', client=client), batch_size=4, drop_last=True)
    loader.resume_from_checkpoint(8)
    handles = loader.handles.aio()
    assert [((await anext(handles)).consumed_rows, loader.get_state()['consumed_train_samples']) for _ in range(2)] == [
        (8, 12),
        (12, 16),
    ]
    await handles.aclose()


async def test_added_datasets_are_processed_separately_and_mixed(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Each dataset is created separately; mixing creates one dataset and deletes its sources."""
    first, second = DatasetMeta('org/one'), DatasetMeta('org/two')
    dataset = LazyDataset(first, client=client)
    dataset.add_dataset(second)
    with pytest.raises(ValueError, match='several'):
        await dataset.map.aio('AlpacaProcessor')
    with pytest.raises(ValueError, match='not added'):
        await dataset.map.aio('AlpacaProcessor', DatasetMeta('org/two'))
    await dataset.map.aio('AlpacaProcessor', second)
    await dataset.mix_dataset.aio(interleave=False)
    await dataset.encode.aio()
    requests = gateway.calls['CreateDataset']
    assert [request.source.hub.dataset_id for request in requests] == ['org/two', 'org/one', '']
    assert [request.is_lazy for request in requests] == [False, False, True]
    assert requests[2].source.mixture == dataset_pb2.MixtureSource(dataset_ids=['ds-2', 'ds-1'], is_interleaved=False)
    assert [request.dataset_id for request in gateway.calls['DeleteDataset']] == ['ds-2', 'ds-1']
    assert [request.dataset_id for request in gateway.calls['Apply']] == ['ds-1', 'ds-3']
    with pytest.raises(ValueError, match='add_dataset'):
        await Dataset(client=client).mix_dataset.aio()


async def test_streamed_datasets_become_a_streamed_mixture(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The parts of a streamed dataset and the mixture are requested as streamed datasets."""
    dataset = IterableDataset('org/one', client=client)
    dataset.add_dataset('org/two')
    await dataset.mix_dataset.aio()
    requests = gateway.calls['CreateDataset']
    assert [request.is_streamed for request in requests] == [True, True, True]
    assert requests[2].source.mixture == dataset_pb2.MixtureSource(dataset_ids=['ds-1', 'ds-2'], is_interleaved=True)


async def test_rows_are_shown_with_tokens_and_problems(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Rows have their columns and arrays of tokens; a row that a step refuses has the server's problem."""
    shown, bad = await LazyDataset('org/name', client=client).peek.aio(4, row_count=2)
    (request,) = gateway.calls['PeekRows']
    assert (request.dataset_id, request.begin_row, request.row_count) == ('ds-1', 4, 2)
    assert (shown.index, shown.row['text'], shown.row['level']) == (4, 'two words', 4)
    assert [shown.row[name].tolist() for name in ('input_ids', 'labels')] == [[5, 6], [6, -100]]
    assert (bad.index, dict(bad.row), bad.problem) == (5, {}, 'rows[5]: has 9 tokens')


async def test_rows_are_read_by_index_and_slice(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A dataset is indexed and iterated like a list; missing rows and rows that a step refuses raise errors."""
    dataset = Dataset('org/name', client=client)

    def read() -> None:
        assert dataset[3]['level'] == 3
        assert dataset[-1]['level'] == 9
        assert [row['level'] for row in dataset[:5]] == [0, 1, 2, 3, 4]
        assert [row['level'] for row in dataset[6:99]] == [6, 7, 8, 9]
        assert [row['level'] for row in dataset[-1:5:-2]] == [9, 7]
        assert dataset[7:3] == []
        for missing in (10, -11, 1 << 40):
            with pytest.raises(IndexError, match='10 rows'):
                dataset[missing]
        with pytest.raises(ValueError, match='row 5 cannot be read'):
            list(dataset)
        gateway.rows = 5
        assert [row['level'] for row in Dataset('org/name', client=client)] == [0, 1, 2, 3, 4]

    await asyncio.to_thread(read)
    sizes = [(request.begin_row, request.row_count) for request in gateway.calls['PeekRows']]
    assert sizes[2:4] == [(0, 5), (3, 2)]


async def test_repr_needs_no_call(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The text of a dataset shows its source, and the record that the server returned last."""
    dataset = LazyDataset('org/name', client=client)
    assert repr(dataset) == "LazyDataset('org/name', not created yet)"
    assert not gateway.calls['CreateDataset']
    await dataset.describe.aio()
    assert repr(dataset) == "LazyDataset('org/name', dataset_id='ds-1', rows=10, columns=[], is_encoded=False)"
    dataset.add_dataset('org/two')
    assert repr(dataset) == 'LazyDataset(2 datasets, not mixed)'
    assert repr(Dataset(DatasetMeta(data=[]), client=client)) == "Dataset('rows in memory', not created yet)"


async def test_rows_are_saved_locally_despite_an_interruption(
    gateway: FakeGateway, client: TwinkleClient, tmp_path: Path
) -> None:
    """An interrupted export resumes, and no partial file remains."""
    dataset = Dataset('org/name', client=client)
    gateway.fail('AfterExportChunk', UNREACHABLE)
    await dataset.save_as.aio(tmp_path / 'deep' / 'rows.jsonl')
    assert [request.offset for request in gateway.calls['ExportDataset']] == [0, 5]
    assert [path.name for path in (tmp_path / 'deep').iterdir()] == ['rows.jsonl']
    assert (tmp_path / 'deep' / 'rows.jsonl').read_text() == '{"n": 0}\n{"n": 1}\n'
    with pytest.raises(ValueError, match='jsonl'):
        await dataset.save_as.aio(tmp_path / 'rows.xml')


async def test_refused_export_leaves_the_file_unchanged(
    gateway: FakeGateway, client: TwinkleClient, tmp_path: Path
) -> None:
    """A refused export does not change the existing file and leaves no partial file."""
    path = tmp_path / 'rows.jsonl'
    path.write_text('before')
    gateway.fail('AfterExportChunk', failure(grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD'))
    with pytest.raises(UsageError):
        await Dataset('org/name', client=client).save_as.aio(path)
    assert [item.name for item in path.parent.iterdir()] == ['rows.jsonl']
    assert path.read_text() == 'before'
