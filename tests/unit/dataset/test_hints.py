"""Options of other dataset libraries: what is so anyway is taken, what has no effect is told, what is wrong refused."""

import logging
from typing import Any

import pytest

from twinkle.dataset import Dataset, DatasetError, DatasetMeta, IterablePackingDataset, PackingDataset

ROWS = [{'x': number} for number in range(4)]
SAME: dict[str, Any] = {'load_from_cache_file': False, 'num_proc': 1, 'batch_size': None, 'keep_in_memory': True}


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the library logs."""
    caplog.set_level(logging.WARNING)
    return caplog


def copied(columns: Any) -> Any:
    """Change nothing."""
    return columns


def test_what_is_so_anyway_is_taken_in_silence(told: pytest.LogCaptureFixture) -> None:
    """As programs type it."""
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.map(copied, batched=True, **SAME)
    dataset.filter(lambda row: row['x'] > 1, batched=False, **SAME)
    assert told.records == []
    assert len(dataset) == 2


@pytest.mark.parametrize(
    'hint',
    [{'num_proc': 4}, {'load_from_cache_file': True}, {'batch_size': 10}, {'desc': 'x'}, {'keep_in_memory': False}],
)
def test_what_has_no_effect_is_told(hint: Any, told: pytest.LogCaptureFixture) -> None:
    """Once for each verb, by the option's name; the rows are what they would be."""
    dataset = Dataset(DatasetMeta(data=ROWS))
    dataset.map(copied, **hint)
    assert [record.args[1] for record in told.records if record.args] == list(hint)
    assert list(dataset) == ROWS


def test_functions_get_what_the_verb_gives_them() -> None:
    """A function of rows where columns come, or the reverse, would compute nonsense."""
    dataset = Dataset(DatasetMeta(data=ROWS))
    with pytest.raises(DatasetError):
        dataset.map(copied, batched=False)
    with pytest.raises(DatasetError):
        dataset.filter(lambda row: True, batched=True)
    with pytest.raises(TypeError):
        dataset.map(copied, number_of_processes=2)  # type: ignore[call-arg]
    assert list(dataset) == ROWS


@pytest.mark.parametrize('kind', [PackingDataset, IterablePackingDataset])
def test_processes_for_packing_are_told(kind: Any, told: pytest.LogCaptureFixture) -> None:
    """Packing uses one."""
    kind(DatasetMeta(data=ROWS), packing_num_proc=4)
    assert [record.args for record in told.records] == [('packing_num_proc', 4)]
    with pytest.raises(ValueError, match='packing_num_proc'):
        kind(DatasetMeta(data=ROWS), packing_num_proc=0)
