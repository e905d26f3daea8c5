"""Options of other dataset libraries are accepted, logged if they have no effect, or refused if they are wrong."""

import logging
from typing import Any

import pytest

from twinkle.dataset import Dataset, DatasetError, DatasetMeta, IterablePackingDataset, PackingDataset

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


@pytest.mark.parametrize(
    'hint',
    [{'num_proc': 4}, {'load_from_cache_file': True}, {'batch_size': 10}, {'desc': 'x'}, {'keep_in_memory': False}],
)
def test_options_without_effect_are_logged(hint: Any, warnings: pytest.LogCaptureFixture) -> None:
    """Each option without effect is logged once by name, and the rows are unchanged."""
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.map(unchanged, **hint)
    assert [record.args[1] for record in warnings.records if record.args] == list(hint)
    assert list(dataset) == ROWS


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


@pytest.mark.parametrize('kind', [PackingDataset, IterablePackingDataset])
def test_unused_processes_are_logged(kind: Any, warnings: pytest.LogCaptureFixture) -> None:
    """Several processes for packing are logged as unused; zero processes are refused."""
    kind(DatasetMeta(data=ROWS), packing_num_proc=4)
    assert [record.args for record in warnings.records] == [('packing_num_proc', 4)]
    with pytest.raises(ValueError, match='packing_num_proc'):
        kind(DatasetMeta(data=ROWS), packing_num_proc=0)
