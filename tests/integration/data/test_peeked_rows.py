"""Tests of PeekRows: rows of eager and lazy datasets, with problems, limits and access."""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.data_service import (
    ENCODE,
    RunningData,
    chat,
    chats,
    credits_for,
    iterate,
    map_with,
    new_request_id,
    refusal_of,
    rows,
    serving_data,
    set_template,
    start,
    upload_chunk,
    upload_header,
)
from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import dataset_service_pb2 as wire
from twinkle_services.data.application.datasets import PEEKED_BYTES

TURNS = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'two words'}]
NAMED = rows(*({'query': 'who are you', 'response': f'{{{{NAME}}}} {number}'} for number in range(30)))
MAPPED = map_with('SelfCognitionProcessor', model_name='m', model_author='us')


@pytest.fixture
async def service(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[RunningData]:
    """A data service that may read the folder of the tiny model."""
    async with serving_data(tmp_path, base_models=(str(tiny_llama_dir),)) as running:
        yield running


async def create(service: RunningData, source: Any, *steps: Any, is_lazy: bool) -> dataset_pb2.Dataset:
    """Create a dataset and return it."""
    request = wire.CreateDatasetRequest(request_id=new_request_id(), source=source, steps=steps, is_lazy=is_lazy)
    return (await service.datasets.CreateDataset(request, metadata=service.metadata)).dataset


async def peek(service: RunningData, dataset: dataset_pb2.Dataset, **fields: Any) -> list[wire.PeekedRow]:
    """Return rows of a dataset."""
    request = wire.PeekRowsRequest(dataset_id=dataset.dataset_id, **fields)
    return list((await service.datasets.PeekRows(request, metadata=service.metadata)).rows)


@pytest.mark.parametrize('steps', [(), (MAPPED,), (MAPPED, 'template', ENCODE)])
async def test_lazy_rows_equal_eager_ones(service: RunningData, tiny_llama_dir: Path, steps: tuple[Any, ...]) -> None:
    """A lazy dataset shows the rows of an eager dataset, before and after encoding."""
    steps = tuple(set_template(tiny_llama_dir) if step == 'template' else step for step in steps)
    eager, lazy = [await create(service, NAMED, *steps, is_lazy=is_lazy) for is_lazy in (False, True)]
    shown = await peek(service, lazy, begin_row=3, row_count=4)
    assert shown == await peek(service, eager, begin_row=3, row_count=4)
    assert [row.index for row in shown] == [3, 4, 5, 6]
    assert {row.HasField('feature') for row in shown} == {ENCODE in steps}
    name = 'm' if steps else '{{NAME}}'
    assert f'{name} 3' in str(shown[0].columns)


async def test_tokens_and_labels_are_those_of_a_loader(service: RunningData, tiny_llama_dir: Path) -> None:
    """A row's tokens and labels equal those that a loader streams, and other columns stay readable."""
    source = rows({'messages': TURNS, 'level': 1, 'note': None})
    dataset = await create(service, source, set_template(tiny_llama_dir), ENCODE, is_lazy=True)
    loader = await service.open(dataset.dataset_id, 1)
    item, _ = [item async for item in service.stream(start(loader.loader_id), credits_for(2))]
    (row,) = await peek(service, dataset)
    assert row.feature == item.batch.features[0]
    labels = np.frombuffer(row.feature.labels.data, dtype=np.int32)
    assert 0 < (labels >= 0).sum() < len(labels)
    assert (row.columns['level'], row.columns['note']) == (1, None)
    assert row.columns['messages'][1]['content'] == 'two words'


async def test_numbers_of_rows_are_limited(service: RunningData) -> None:
    """The default number of rows is 20, a range beyond the end is empty, and negative numbers are refused."""
    dataset = await create(service, NAMED, is_lazy=True)
    assert len(await peek(service, dataset)) == 20
    assert len(await peek(service, dataset, begin_row=5, row_count=1000)) == 25
    assert await peek(service, dataset, begin_row=30) == []
    assert await peek(service, dataset, begin_row=2**62) == []
    for field in ('begin_row', 'row_count'):
        request = wire.PeekRowsRequest(dataset_id=dataset.dataset_id, **{field: -1})
        refused = await refusal_of(service.datasets.PeekRows(request, metadata=service.metadata))
        assert (refused.code, refused.field) == ('INVALID_ARGUMENT', field)


async def test_a_bad_row_has_a_problem(service: RunningData, tiny_llama_dir: Path) -> None:
    """A row that a step of a lazy dataset refuses is returned with the problem, and the other rows are shown."""
    source = chats(*(chat('question', 'a ' * (90 if index == 1 else 1)) for index in range(3)))
    dataset = await create(service, source, set_template(tiny_llama_dir, max_length=100), ENCODE, is_lazy=True)
    shown = await peek(service, dataset)
    assert [bool(row.problem) for row in shown] == [False, True, False]
    assert shown[1].problem.startswith('rows[1]')
    assert not shown[1].HasField('feature')


async def test_large_rows_end_a_response(service: RunningData) -> None:
    """A response ends before the limit of bytes; a single row above the limit has a problem."""
    texts = ['a' * size for size in (10, PEEKED_BYTES // 2, PEEKED_BYTES, 2 * PEEKED_BYTES, 10)]
    dataset = await create(service, rows(*({'text': text} for text in texts)), is_lazy=True)
    found: list[wire.PeekedRow] = []
    counts: list[int] = []
    while part := await peek(service, dataset, begin_row=len(found)):
        found += part
        counts.append(len(part))
    assert counts == [2, 1, 1, 1]
    assert [len(row.columns['text']) if 'text' in row.columns else 0 for row in found] == [
        10,
        PEEKED_BYTES // 2,
        0,
        0,
        10,
    ]
    assert [str(PEEKED_BYTES) in row.problem for row in found] == [False, False, True, True, False]


async def test_extreme_numbers_stay_readable(service: RunningData, tmp_path: Path) -> None:
    """Numbers that JSON cannot express become null, so that every client can show the row."""
    dataset = await create(service, rows({'values': [1.5, math.nan, math.inf, 2**60]}), is_lazy=False)
    (row,) = await peek(service, dataset)
    assert list(row.columns['values']) == [1.5, None, None, 2**60]


async def test_values_of_any_shape_are_shown(service: RunningData) -> None:
    """Columns that only have the names of token columns are shown unchanged and do not hide other rows."""
    source = rows({'input_ids': 'text', 'labels': [[1], [2, 3]]}, {'input_ids': None, 'labels': [2**63]})
    dataset = await create(service, source, is_lazy=True)
    first, second = await peek(service, dataset)
    assert not any(row.problem or row.HasField('feature') for row in (first, second))
    assert (first.columns['input_ids'], second.columns['input_ids']) == ('text', None)
    assert str(first.columns['labels']).count('number_value') == 3


async def test_values_nested_too_deeply_end_in_an_ellipsis(service: RunningData) -> None:
    """The part of an uploaded value that is too deep for a message is replaced by an ellipsis."""
    content = b'{"a": ' + b'[' * 60 + b']' * 60 + b'}'
    parts = iterate([upload_header('u', len(content)), upload_chunk(0, content)])
    await service.datasets.Upload(parts, metadata=service.metadata)
    upload = dataset_pb2.UploadSource(upload_id='u', format=dataset_pb2.FILE_FORMAT_JSONL)
    dataset = await create(service, dataset_pb2.DatasetSource(upload=upload), is_lazy=True)
    (row,) = await peek(service, dataset)
    value: Any = row.columns['a']
    while not isinstance(value, str):
        (value,) = value
    assert value == '…'


async def test_other_tenants_and_scopes_are_refused(service: RunningData) -> None:
    """Another tenant's dataset is not found, and the method needs the scope `data`."""
    dataset = await create(service, NAMED, is_lazy=True)
    request = wire.PeekRowsRequest(dataset_id=dataset.dataset_id)
    trainer = service.as_tenant('alice', scopes='train')
    for reason, other in {'DATASET_NOT_FOUND': service.as_tenant('bob'), 'SCOPE_MISSING': trainer}.items():
        refused = await refusal_of(other.datasets.PeekRows(request, metadata=other.metadata))
        assert refused.reason == reason
