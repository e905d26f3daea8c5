"""Common formats of rows give the same features in the data service as in process; errors name a solution."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.data_service import (
    RunningData,
    credits_for,
    ints_of,
    new_request_id,
    refusal_of,
    rows,
    serving_data,
    set_template,
    start,
)
from fixtures.row_formats import BLUE, FORMATS, SKY
from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.preprocessor import ROW_FORMATS


@pytest.fixture
async def service(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[RunningData]:
    """A data service that may read the folder of the tiny model."""
    async with serving_data(tmp_path, base_models=(str(tiny_llama_dir),)) as running:
        yield running


def encode(name: str | None = None, **fields: Any) -> dataset_pb2.DatasetStep:
    """Return the step that encodes rows of a format."""
    number = dataset_pb2.RowFormat.Value(f'ROW_FORMAT_{name.upper()}') if name else 0
    return dataset_pb2.DatasetStep(encode=dataset_pb2.EncodeStep(row_format=number, **fields))


async def features_of(service: RunningData, dataset: dataset_pb2.Dataset) -> list[tuple[list[int], list[int]]]:
    """Return tokens and labels of all examples."""
    loader = await service.open(dataset.dataset_id, 1)
    items = [item async for item in service.stream(start(loader.loader_id), credits_for(64))]
    features = [feature for item in items for feature in item.batch.features]
    labels = [ints_of(feature.labels) if feature.HasField('labels') else [] for feature in features]
    return [(ints_of(feature.input_ids), row) for feature, row in zip(features, labels, strict=True)]


@pytest.mark.parametrize(('name', 'row', 'examples'), FORMATS.values(), ids=FORMATS)
async def test_features_equal_those_in_process(
    name: str, row: dict[str, Any], examples: list[Any], service: RunningData, tiny_llama_dir: Path
) -> None:
    """Each format gives features bitwise equal to the library's, whether the format is recognized or named."""
    local = Dataset(DatasetMeta(data=[row, row]))
    local.set_template('Template', model_id=str(tiny_llama_dir))
    report = local.encode()
    expected = [(list(map(int, item['input_ids'])), list(map(int, item['labels']))) for item in local]
    assert len(expected) == 2 * len(examples)
    recognized = await service.create(rows(row, row), set_template(tiny_llama_dir), encode())
    named = await service.create(rows(row, row), set_template(tiny_llama_dir), encode(name))
    assert list(recognized.warnings) == report
    assert named.steps[1].encode.row_format == dataset_pb2.RowFormat.Value(f'ROW_FORMAT_{name.upper()}')
    for dataset in (recognized, named):
        assert await features_of(service, dataset) == expected
    lazy = await service.datasets.CreateDataset(
        dataset_service_pb2.CreateDatasetRequest(
            request_id=new_request_id(),
            source=rows(row, row),
            steps=[set_template(tiny_llama_dir), encode(name)],
            is_lazy=True,
        ),
        metadata=service.metadata,
    )
    if name != 'preference':
        assert await features_of(service, lazy.dataset) == expected


async def test_every_format_of_the_library_has_a_value_in_the_contract() -> None:
    """The names of the formats in the contract equal those in the library."""
    names = {name.removeprefix('ROW_FORMAT_').lower() for name, _ in dataset_pb2.RowFormat.items()}
    assert names == {'unspecified', *ROW_FORMATS}


@pytest.mark.parametrize(
    ('given', 'step', 'field', 'problem'),
    [
        ({'title': 'x'}, encode(), 'rows[0].messages', 'the columns (title) fit no format'),
        ({'prompt': 'a'}, encode('preference'), 'rows[0].chosen', 'the format preference needs chosen, rejected'),
        (
            {'prompt': 'a'}, dataset_pb2.DatasetStep(encode={'row_format': 99}), 'steps[1].encode.row_format',
            'must be one of MESSAGES',
        ),
    ],
)  # fmt: skip
async def test_rows_without_the_format_are_refused(
    given: Any, step: Any, field: str, problem: str, service: RunningData, tiny_llama_dir: Path
) -> None:
    """The error names the row or the argument, and the needed columns."""
    refused = await refusal_of(service.create(rows(given), set_template(tiny_llama_dir), step))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', field)
    assert problem in refused.message


async def test_check_and_prompts_read_the_format(service: RunningData, tiny_llama_dir: Path) -> None:
    """`check` reports examples without labels, and prompts for sampling have no labels."""
    check = dataset_pb2.DatasetStep(check=dataset_pb2.CheckStep())
    pair = {'prompt': [SKY], 'completion': [BLUE]}
    dataset = await service.create(rows(pair, {'prompt': 'a', 'completion': None}), set_template(tiny_llama_dir), check)
    assert list(dataset.warnings) == [
        'rows[1]: completion is missing: the format prompt_completion needs prompt, completion, and the row has prompt'
    ]
    step = encode(is_generation_prompt_added=True)
    prompts = await service.create(rows(pair), set_template(tiny_llama_dir), step)
    local = Dataset(DatasetMeta(data=[pair]))
    local.set_template('Template', model_id=str(tiny_llama_dir))
    local.encode(add_generation_prompt=True)
    assert await features_of(service, prompts) == [(list(map(int, local[0]['input_ids'])), [])]
