"""A dataset's description, and its rows while they are prepared."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from twinkle_services.data.domain.source import HubStream, StreamMixture, StreamPart
from twinkle_services.data.domain.step import Step, TemplateStep

Row = dict[str, Any]
"""A row as a mapping from column names to values; the token columns of encoded rows are arrays."""

TOKEN_COLUMNS = ('input_ids', 'labels', 'position_ids', 'loss_weights', 'completion_mask')
"""Columns that encoding adds, with one number per token. A loader sends these columns; the chat of a row omits them."""

_MAX_REQUESTS = 256
"""Maximum number of recent requests that a dataset stores, in order to recognize repeated requests."""


@dataclass(kw_only=True)
class Table:
    """Rows in memory, and the state of their preparation."""

    rows: list[Row]
    dataset_id: str = ''
    """Dataset from which the rows were loaded; empty for new rows."""
    is_encoded: bool = False
    is_packed: bool = False
    is_lazy: bool = False
    """Whether rows are stored unchanged, and the steps in `pending` are applied to each row when it is read."""
    pending: tuple[Step, ...] = ()
    """Steps to apply to a row when it is read; empty unless the table is lazy or streamed."""
    stream: HubStream | StreamMixture | None = None
    """Source of the rows if they are streamed; `rows` is empty then."""
    template: TemplateStep | None = None
    """Template that encodes chats; None until a step sets it."""
    warnings: list[str] = field(default_factory=list[str])
    """Messages for the tenant about the steps that produced this table."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in the order in which they first occur."""
        if self.stream is not None:
            return self.stream.columns
        return tuple({name: None for row in self.rows for name in row})

    @property
    def token_count(self) -> int:
        """Number of tokens in all rows; 0 for a lazy or streamed table or before encoding."""
        return sum(len(row['input_ids']) for row in self.rows) if self.is_encoded and not self.is_lazy else 0


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The description of a stored dataset."""

    dataset_id: str
    tenant_id: str
    create_time: datetime
    row_count: int
    columns: tuple[str, ...]
    is_encoded: bool
    is_packed: bool
    token_count: int
    template: TemplateStep | None
    steps: tuple[Step, ...]
    warnings: tuple[str, ...]
    requests: tuple[tuple[str, str], ...] = ()
    """`(request_id, fingerprint)` of the latest requests that created or changed the dataset, oldest first."""
    revision: int = 0
    """Increases by one with each change of the rows."""
    is_lazy: bool = False
    """See `Table`."""
    pending: tuple[Step, ...] = ()
    """See `Table`."""
    stream: HubStream | StreamMixture | None = None
    """See `Table`."""
    content_digest: str = ''
    """Digest of the data that determines a loader's batches; set by the store when it writes the rows."""

    @property
    def stream_parts(self) -> tuple[StreamPart, ...]:
        """Streams that the rows come from; empty unless the dataset is streamed."""
        if isinstance(self.stream, StreamMixture):
            return self.stream.parts
        return () if self.stream is None else (StreamPart(stream=self.stream),)

    @property
    def process_count(self) -> int:
        """Number of processes that read the rows of a streamed dataset at the same time."""
        return len(self.stream_parts) if isinstance(self.stream, StreamMixture) and self.stream.is_interleaved else 1

    def fingerprint_of(self, request_id: str) -> str | None:
        """Return the fingerprint of an earlier request; None if the dataset has no request with this id."""
        return dict(self.requests).get(request_id)

    def changed(self, table: Table, steps: tuple[Step, ...], request: tuple[str, str]) -> 'Dataset':
        """Return the dataset after `request` applied `steps`, with `table` as the result and no content digest."""
        return Dataset(
            dataset_id=self.dataset_id,
            tenant_id=self.tenant_id,
            create_time=self.create_time,
            row_count=len(table.rows),
            columns=table.columns,
            is_encoded=table.is_encoded,
            is_packed=table.is_packed,
            token_count=table.token_count,
            template=table.template,
            is_lazy=table.is_lazy,
            pending=table.pending,
            stream=table.stream,
            steps=(*self.steps, *steps),
            warnings=(*self.warnings, *table.warnings),
            requests=(*self.requests, request)[-_MAX_REQUESTS:],
            revision=self.revision + 1,
        )


def new_dataset(dataset_id: str, *, tenant_id: str, create_time: datetime) -> Dataset:
    """Return a dataset without rows."""
    return Dataset(
        dataset_id=dataset_id,
        tenant_id=tenant_id,
        create_time=create_time,
        row_count=0,
        columns=(),
        is_encoded=False,
        is_packed=False,
        token_count=0,
        template=None,
        steps=(),
        warnings=(),
    )
