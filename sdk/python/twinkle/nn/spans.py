"""Assignment of a pack's rows to sequences and adapters."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinkle.nn.errors import PackError

if TYPE_CHECKING:
    from twinkle.nn.dropout import RowDropout
    from twinkle.nn.kv_cache import KVCache
    from twinkle.nn.layer_update import AdapterWeights


@dataclass(frozen=True)
class SequenceSpan:
    """Rows `[begin_row, end_row)` of the pack are consecutive tokens of one sequence."""

    begin_row: int
    end_row: int
    cache: 'KVCache | None' = None
    """Keys and values of the tokens before these rows; the forward pass appends to it in place."""
    parent: int | None = None
    """Index of an earlier span of the pack. These rows continue the sequence of that span, so they attend to its rows
    and to the rows of its parents. Several spans may have the same parent. None for the first rows of a sequence."""


@dataclass(frozen=True)
class AdapterSpan:
    """Rows `[begin_row, end_row)` of the pack use this adapter; rows in no span use the base model."""

    begin_row: int
    end_row: int
    adapter: 'AdapterWeights | None'
    dropout: 'RowDropout | None' = None
    """Dropout of the adapter in this pass; None without dropout, or if the pass is not for training."""


def check_spans(row_count: int, sequences: Sequence[SequenceSpan], adapters: Sequence[AdapterSpan]) -> None:
    """Check that the sequences cover the rows in order and that adapters do not overlap.

    Raises:
        PackError: the spans do not cover the rows, overlap, or are malformed, or a span continues a sequence of a
            different adapter.
    """
    row = 0
    for index, span in enumerate(sequences):
        if span.begin_row != row or span.end_row <= row:
            raise PackError(f'sequences[{index}] must begin at row {row} and not be empty, got {span}')
        row = span.end_row
    if row != row_count:
        raise PackError(f'sequences cover {row} of {row_count} rows; they must cover all rows')
    row = 0
    for index, span in enumerate(adapters):
        if span.begin_row < row or span.end_row <= span.begin_row:
            raise PackError(f'adapters[{index}] must begin at row {row} or later and not be empty, got {span}')
        row = span.end_row
    if row > row_count:
        raise PackError(f'adapters end at row {row}, but the pack has {row_count} rows')
    for index, span in enumerate(sequences):
        if span.parent is not None:
            _check_parent(index, sequences, adapters)


def _check_parent(index: int, sequences: Sequence[SequenceSpan], adapters: Sequence[AdapterSpan]) -> None:
    span = sequences[index]
    if span.parent is None or not 0 <= span.parent < index:
        raise PackError(f'sequences[{index}].parent must be the index of an earlier span, got {span.parent}')
    parent = sequences[span.parent]
    if span.cache is not None or parent.cache is not None:
        raise PackError(f'sequences[{index}] has a parent, so neither this span nor its parent can have a cache')
    owners = [_adapter_of(row, adapters) for row in (parent.begin_row, span.begin_row, span.end_row - 1)]
    if len(set(owners)) > 1:
        raise PackError(f'sequences[{index}] and its parent must have the same adapter')


def _adapter_of(row: int, adapters: Sequence[AdapterSpan]) -> int | None:
    """Return the index of the span of a row; None if the row uses the base model."""
    index = bisect_right(adapters, row, key=_begin_of) - 1
    return index if index >= 0 and row < adapters[index].end_row else None


def _begin_of(span: AdapterSpan) -> int:
    return span.begin_row
