"""Detection of Hugging Face `datasets` objects without importing that library."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast


def split_of(data: Any, split: str | None) -> Any:
    """Return a split of a `DatasetDict`; return other data unchanged.

    Raises:
        ValueError: The split does not exist.
    """
    if not _is_any(data, 'DatasetDict', 'IterableDatasetDict'):
        return data
    splits = cast('Mapping[str, Any]', data)
    if (split or 'train') not in splits:
        raise ValueError(f'split {split!r} does not exist; data has the splits {", ".join(splits)}')
    return splits[split or 'train']


def is_table(data: Any) -> bool:
    """Return whether `data` is a `datasets.Dataset`."""
    return _is_any(data, 'Dataset')


def _is_any(data: Any, *names: str) -> bool:
    library = sys.modules.get('datasets')
    kinds: Sequence[Any] = [getattr(library, name, None) for name in names]
    return any(isinstance(kind, type) and isinstance(data, kind) for kind in kinds)
