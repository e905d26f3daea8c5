"""Which rows a dataset is made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class DatasetMeta:
    """Names a dataset, or holds its rows."""

    dataset_id: str | None = None
    """`hf://org/name`, `ms://org/name`, a bare id, or the path of a file or folder. Unset with `data`."""
    subset_name: str = 'default'
    """Subset, where the dataset has several."""
    split: str = 'train'
    """Split, where the dataset has several."""
    data_slice: range | slice | Sequence[int] | None = None
    """Row indices to take, in this order; those past the end are left out with a warning. Unset: all."""
    data: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]] | None = None
    """Rows, or columns, given here; or a `datasets.Dataset`, a `datasets.IterableDataset` or a dict of their splits."""

    def __post_init__(self) -> None:
        """Refuse a meta that names no rows or two sources of them.

        Raises:
            ValueError: says so.
        """
        if (self.dataset_id is None) == (self.data is None):
            raise ValueError('give either dataset_id or data')

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f'{self.dataset_id or "rows in memory"} ({self.subset_name}, {self.split})'
