"""Objects of Hugging Face `datasets`, known by the library that the program brought; it is never loaded here."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast


def split_of(data: Any, split: str | None) -> Any:
    """Return one split of a dict of them; whatever else it is, as it is.

    Raises:
        ValueError: it has no such split.
    """
    if not _is_any(data, 'DatasetDict', 'IterableDatasetDict'):
        return data
    splits = cast('Mapping[str, Any]', data)
    if (split or 'train') not in splits:
        raise ValueError(f'split {split!r} is not in data; there are {", ".join(splits)}')
    return splits[split or 'train']


def is_table(data: Any) -> bool:
    """Say whether rows are a `datasets.Dataset`."""
    return _is_any(data, 'Dataset')


def _is_any(data: Any, *names: str) -> bool:
    library = sys.modules.get('datasets')
    kinds: Sequence[Any] = [getattr(library, name, None) for name in names]
    return any(isinstance(kind, type) and isinstance(data, kind) for kind in kinds)
