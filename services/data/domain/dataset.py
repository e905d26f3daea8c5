"""A dataset: what is known of it, and its rows while they are worked on."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from services.data.domain.step import Step, TemplateStep

Row = dict[str, Any]
"""Column name to value; the token columns of encoded rows are arrays."""

TOKEN_COLUMNS = ('input_ids', 'labels', 'position_ids', 'loss_weights', 'completion_mask')
"""What encoding adds, a number a token: what a loader sends, and what no chat carries along."""

_REMEMBERED_REQUESTS = 256
"""Request ids a dataset remembers, so that a repeat is told from a new request."""


@dataclass(kw_only=True)
class Table:
    """Rows in memory, and how far they are prepared."""

    rows: list[Row]
    dataset_id: str = ''
    """Dataset they were loaded from; empty for new rows."""
    is_encoded: bool = False
    is_packed: bool = False
    is_lazy: bool = False
    """Whether rows are kept as they came, and `pending` is done to each when it is read."""
    pending: tuple[Step, ...] = ()
    """Steps to be done to rows that are read."""
    template: TemplateStep | None = None
    """How chats become tokens; None until chosen."""
    warnings: list[str] = field(default_factory=list[str])
    """What the owner should know of the steps done to this table."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in order of appearance."""
        return tuple({name: None for row in self.rows for name in row})

    @property
    def token_count(self) -> int:
        """Tokens in all rows; 0 until encoded."""
        return sum(len(row['input_ids']) for row in self.rows) if self.is_encoded and not self.is_lazy else 0


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What the service knows of a dataset."""

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
    """`(request_id, fingerprint)` of the requests that made and changed it, oldest first."""
    revision: int = 0
    """Grows by one with each change of the rows."""
    is_lazy: bool = False
    """See `Table`."""
    pending: tuple[Step, ...] = ()
    """See `Table`."""
    content_digest: str = ''
    """Of all that a loader reads; set by the store that holds the rows."""

    def fingerprint_of(self, request_id: str) -> str | None:
        """Return the fingerprint a request id came with, None if it is not remembered."""
        return dict(self.requests).get(request_id)

    def changed(self, table: Table, steps: tuple[Step, ...], request: tuple[str, str]) -> 'Dataset':
        """Return what the dataset is once `steps` made `table` of it."""
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
            steps=(*self.steps, *steps),
            warnings=(*self.warnings, *table.warnings),
            requests=(*self.requests, request)[-_REMEMBERED_REQUESTS:],
            revision=self.revision + 1,
        )


def new_dataset(dataset_id: str, *, tenant_id: str, create_time: datetime) -> Dataset:
    """Return a dataset that has no rows yet."""
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
