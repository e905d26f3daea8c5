"""Options of the library `datasets` are logged if they have no effect, or refused if they are wrong."""

import logging
from typing import Any

import pytest

from twinkle.dataset import (
    Dataset,
    DatasetError,
    DatasetMeta,
    IterableDataset,
    IterablePackingDataset,
    LazyDataset,
    PackingDataset,
)

ROWS = [{'x': number} for number in range(4)]
MATCHING_OPTIONS: dict[str, Any] = {
    'load_from_cache_file': False,
    'num_proc': 1,
    'batch_size': None,
    'keep_in_memory': True,
}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The captured warnings of the library."""
    caplog.set_level(logging.WARNING)
    return caplog


def unchanged(columns: Any) -> Any:
    """Return the columns unchanged."""
    return columns


def test_options_that_match_the_behaviour_are_not_logged(warnings: pytest.LogCaptureFixture) -> None:
    """Options whose values match this library's behaviour are accepted without a warning."""
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.map(unchanged, batched=True, **MATCHING_OPTIONS)
    dataset.filter(lambda row: row['x'] > 1, batched=False, **MATCHING_OPTIONS)
    assert warnings.records == []
    assert len(dataset) == 2


@pytest.mark.parametrize('hint', [{'load_from_cache_file': True}, {'desc': 'x'}, {'keep_in_memory': False}])
def test_options_without_effect_on_lists_are_logged(hint: Any, warnings: pytest.LogCaptureFixture) -> None:
    """Options about files and progress have no effect on rows in memory, and each is logged once with its name."""
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.map(unchanged, **hint)
    assert [record.args[1] for record in warnings.records if record.args] == list(hint)
    assert list(dataset) == ROWS


@pytest.mark.parametrize('kind', [LazyDataset, IterableDataset])
def test_options_without_effect_on_computed_rows_are_logged(kind: Any, warnings: pytest.LogCaptureFixture) -> None:
    """Lazy datasets and streams process rows when they are read, so they log all options."""
    dataset = kind(DatasetMeta(data=ROWS))
    options = {'num_proc': 4, 'batch_size': 10, 'keep_in_memory': False}
    dataset.map(unchanged, **options)
    assert sorted(str(record.args[1]) for record in warnings.records if record.args) == sorted(options)
    assert list(dataset) == ROWS


@pytest.mark.parametrize('options', [{'num_proc': -1}, {'batch_size': 0}])
def test_options_out_of_range_are_refused(options: Any) -> None:
    """A negative number of processes and an empty batch are refused with the name of the option."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Dataset(DatasetMeta(data=ROWS)).map(unchanged, **options)


def test_wrong_batched_options_are_refused() -> None:
    """An unknown option is refused, as is a value of `batched` that contradicts the function's arguments."""
    dataset = Dataset(DatasetMeta(data=ROWS))
    with pytest.raises(DatasetError):
        dataset.map(unchanged, batched=False)
    with pytest.raises(DatasetError):
        dataset.filter(lambda row: True, batched=True)
    with pytest.raises(TypeError):
        dataset.map(unchanged, number_of_processes=2)  # type: ignore[call-arg]
    assert list(dataset) == ROWS


def test_processes_of_a_packed_stream_are_logged(warnings: pytest.LogCaptureFixture) -> None:
    """A stream logs several processes for packing as unused, and zero processes are refused."""
    IterablePackingDataset(DatasetMeta(data=ROWS), packing_num_proc=4)
    assert [record.args for record in warnings.records] == [(4,)]
    for kind in (PackingDataset, IterablePackingDataset):
        with pytest.raises(ValueError, match='packing_num_proc'):
            kind(DatasetMeta(data=ROWS), packing_num_proc=0)
