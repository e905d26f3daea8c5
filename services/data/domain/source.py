"""Where a dataset's rows come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A hub dataset, or a path the service may read."""

    dataset_id: str
    subset_name: str = 'default'
    split: str = 'train'
    begin_row: int | None = None
    """None: from the first."""
    end_row: int | None = None
    """None: to the last."""


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Rows, or chats as rows, that came with the request."""

    rows: Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class UploadSource:
    """An uploaded file."""

    upload_id: str
    file_format: Literal['jsonl', 'parquet', 'csv']


@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """Other datasets as one."""

    dataset_ids: tuple[str, ...]
    is_interleaved: bool = False


Source = HubSource | RowSource | UploadSource | MixtureSource
