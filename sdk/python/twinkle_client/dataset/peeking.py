"""Rows of a dataset, for display."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.api.data.v1 import dataset_service_pb2
from twinkle.api.data.v1.dataset_service_pb2_grpc import DatasetServiceStub
from twinkle_client.convert import feature_from_proto
from twinkle_client.convert.config import plain_value
from twinkle_client.rpc import Connection

_MAX_ROWS = 100
"""Maximum number of rows in a response."""


@dataclass(frozen=True, kw_only=True)
class PeekedRow:
    """A row as a loader would read it."""

    index: int
    """Index of the row in the dataset."""
    row: Mapping[str, Any]
    """Columns of the row, and its token arrays if the dataset is encoded. Empty if there is a problem."""
    problem: str
    """Why a step fails for this row, or why the row is too large. Empty without a problem."""


async def peek_rows(connection: Connection, dataset_id: str, *, begin_row: int, row_count: int) -> Sequence[PeekedRow]:
    """Return consecutive rows from the index `begin_row` on.

    Raises:
        TypeError: A number is not an integer.
        Error: The server refused the request.
    """
    request = dataset_service_pb2.PeekRowsRequest(
        dataset_id=dataset_id, begin_row=operator.index(begin_row), row_count=operator.index(row_count)
    )
    response = await connection.unary(DatasetServiceStub(connection.channel).PeekRows, request)
    return [_peeked(message) for message in response.rows]


def rows_of(peek: Callable[[int, int], Sequence[PeekedRow]], chosen: range) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of consecutive indices; stop at the end of the dataset.

    Raises:
        ValueError: A step fails for a row, or the row is too large.
    """
    begin = chosen.start
    while begin < chosen.stop and (shown := peek(begin, min(chosen.stop - begin, _MAX_ROWS))):
        for item in shown:
            if item.problem:
                raise ValueError(f'row {item.index} cannot be read: {item.problem}')
            yield item.row
        begin += len(shown)


def _peeked(message: dataset_service_pb2.PeekedRow) -> PeekedRow:
    columns: Mapping[str, Any] = plain_value(message.columns)
    feature: Mapping[str, Any] = feature_from_proto(message.feature) if message.HasField('feature') else {}
    return PeekedRow(index=message.index, row={**columns, **feature}, problem=message.problem)
