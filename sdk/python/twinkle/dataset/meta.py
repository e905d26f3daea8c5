"""Description of the rows of a dataset."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class DatasetMeta:
    """Source of the rows of a dataset: either `dataset_id` or `data`."""

    dataset_id: str | None = None
    """`hf://org/name`, `ms://org/name`, a bare id, or the path of a file or folder. None if `data` is given."""
    subset_name: str = 'default'
    """Name of the subset, for datasets with several subsets."""
    split: str = 'train'
    """Name of the split, for datasets with several splits."""
    data_slice: range | slice | Sequence[int] | None = None
    """Indices of the rows to take, in order. Streams need ascending indices of at least 0. Indices of a range or a
    sequence that are past the end are skipped with a warning. Default: all rows."""
    data: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]] | None = None
    """Rows or columns in memory, a `datasets.Dataset`, a `datasets.IterableDataset`, or a dict of their splits."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of `datasets.load_dataset`, such as `revision`, `data_files` or `features`. Default: none."""

    def __post_init__(self) -> None:
        """Validate the source.

        Raises:
            ValueError: neither or both of `dataset_id` and `data` are given, or `options` contains an argument that
                another field sets.
        """
        if (self.dataset_id is None) == (self.data is None):
            raise ValueError('give either dataset_id or data, not both or neither')
        taken = sorted({'path', 'name', 'split', 'streaming'} & {*self.options})
        if taken or (self.options and self.dataset_id is None):
            problem = f'cannot contain {", ".join(taken)}' if taken else 'are for files and hubs, not for data'
            raise ValueError(f'options {problem}; use dataset_id, subset_name, split and the class of the dataset')

    @property
    def name(self) -> str:
        """Name for messages, with subset and split."""
        return f'{self.dataset_id or "rows in memory"} ({self.subset_name}, {self.split})'
