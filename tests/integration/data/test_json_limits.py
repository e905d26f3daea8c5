"""DatasetService over loopback: JSON beyond the limits of the parser, and malformed pipelines, are refused."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.data_service import (
    RunningData,
    iterate,
    map_with,
    refusal_of,
    rows,
    serving_data,
    upload_chunk,
    upload_header,
)
from twinkle.api.data.v1 import dataset_pb2


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[RunningData]:
    """A service without datasets."""
    async with serving_data(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    'line',
    [
        b'{"a":' + b'[' * 200_000 + b']' * 200_000 + b'}',
        b'{"a":' * 900 + b'1' + b'}' * 900,
        b'{"a":' * 65 + b'1' + b'}' * 65,
        b'{"a":' + b'9' * 5000 + b'}',
        b'{"a":"\\ud800"}',
        b'{"\\uDFFF":1}',
    ],
    ids=lambda line: line[:12].decode() + f' {len(line)}',
)
async def test_json_beyond_the_limits_is_refused(service: RunningData, line: bytes) -> None:
    """Deep nesting, long integers and unpaired surrogates are refused; the largest permitted depth is accepted."""
    permitted = b'{"a":' * 64 + b'1' + b'}' * 64
    for name, content in (('bad', line), ('good', permitted)):
        parts = iterate([upload_header(name, len(content)), upload_chunk(0, content)])
        await service.datasets.Upload(parts, metadata=service.metadata)
    bad, good = (
        dataset_pb2.DatasetSource(upload=dataset_pb2.UploadSource(upload_id=name, format=dataset_pb2.FILE_FORMAT_JSONL))
        for name in ('bad', 'good')
    )
    refusal = await refusal_of(service.create(bad))
    assert (refusal.code, refusal.reason, refusal.field) == ('INVALID_ARGUMENT', 'INVALID_FIELD', 'source.upload')
    assert (await service.create(good)).row_count == 1


@pytest.mark.parametrize(
    'pipeline',
    [
        ['nope'],
        [['nope'], [{'name': 'nope'}], [{'name': 'nope', 'init_args': {'x': [[]]}}], [''], [['DedupFilter']]],
        ['DedupFilter', {'name': 'nope', 'init_args': {'x': [[]]}}],
        [''],
        [['DedupFilter']],
    ],
    ids=str,
)
async def test_unknown_stage_of_a_pipeline_is_refused(service: RunningData, pipeline: list[Any]) -> None:
    """A pipeline with an unknown name or a nested list is refused; the error names the arguments of the step."""
    turns = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]
    call = service.create(rows({'messages': turns}), map_with('QualityPreprocessor', pipeline=pipeline))
    refusal = await refusal_of(call)
    assert (refusal.code, refusal.field) == ('INVALID_ARGUMENT', 'steps[0].map.init_args')
