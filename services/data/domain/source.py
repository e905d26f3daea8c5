"""The sources of a dataset's rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinkle_services.data.domain.step import Step

MAX_INTERLEAVED = 4
"""Maximum number of streamed datasets that alternate, because a process reads each of them."""


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A hub dataset, or a path that the service may read."""

    dataset_id: str
    subset_name: str = 'default'
    split: str = 'train'
    begin_row: int | None = None
    """First row; None for the beginning."""
    end_row: int | None = None
    """Row after the last one; None for the end."""


@dataclass(frozen=True, kw_only=True)
class HubStream:
    """The rows of a streamed dataset, which are read from a hub by each loader."""

    hub: HubSource
    revision: str
    """Commit of the repository; empty for files of this machine."""
    columns: tuple[str, ...]
    """Columns of the first row."""


@dataclass(frozen=True, kw_only=True)
class StreamPart:
    """A streamed dataset as a part of a mixture."""

    stream: HubStream
    pending: tuple[Step, ...] = ()
    """Steps to apply to the rows of this part."""


@dataclass(frozen=True, kw_only=True)
class StreamMixture:
    """Streamed datasets whose rows are combined while they are read."""

    parts: tuple[StreamPart, ...]
    is_interleaved: bool
    """Whether rows alternate between the parts; otherwise the parts follow one another."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the first rows of all parts, in the order in which they first occur."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.stream.columns))


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Rows in the request itself; chats are converted to rows."""

    rows: Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class UploadSource:
    """An uploaded file."""

    upload_id: str
    file_format: Literal['jsonl', 'parquet', 'csv']


@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """A combination of several datasets."""

    dataset_ids: tuple[str, ...]
    is_interleaved: bool = False
    """Whether rows alternate between the datasets; otherwise the datasets follow one another."""


Source = HubSource | RowSource | UploadSource | MixtureSource
