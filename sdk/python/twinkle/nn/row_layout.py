"""Division of the rows of a pass among ranks; each rank runs all layers on its own rows.

The division of an adapter's rows depends only on their number n: rank r of U runs the rows from `n r / U` to
`n (r + 1) / U`, rounded down. Sums over the rows of an adapter therefore do not depend on the other adapters of the
pass.

Legend: T rows of the pass, N rows of each rank with padding, R rows of each rank without padding, D hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from twinkle.nn.rows import pad_rows, padded_row_count
from twinkle.nn.sequences import PackedSequences
from twinkle.nn.spans import AdapterSpan


@dataclass(frozen=True)
class RowLayout:
    """Rows of one pass, by the rank that runs them. All ranks compute the same layout."""

    adapters: Sequence[AdapterSpan]
    """Adapters of this rank's rows, which are numbered from 0."""
    row_count: int
    """N: number of rows of each rank."""
    own_R: Tensor
    """int64 [R]: rows of the pass that this rank runs, in order."""
    order_T: Tensor
    """int64 [T]: index of each row of the pass in the concatenation of the N rows of every rank."""

    @classmethod
    def of(
        cls,
        row_count: int,
        adapters: Sequence[AdapterSpan],
        ranks: 'RowRanks',
        *,
        widths: set[int],
        device: torch.device,
    ) -> 'RowLayout':
        """Divide the rows of a pass.

        Args:
            row_count: T.
            adapters: spans of the pass, in order.
            ranks: ranks that divide the rows.
            widths: column counts of the matrix products; they determine the padding of the rows.
            device: device of the tensors.
        """
        pieces = list(_pieces(row_count, adapters))
        shares = [
            [_share(piece.begin_row, piece.end_row, rank=rank, size=ranks.size) for piece in pieces]
            for rank in range(ranks.size)
        ]
        padded_count = rank_row_count([piece.end_row - piece.begin_row for piece in pieces], ranks.size, widths)
        order_T = torch.empty(row_count, dtype=torch.int64)
        rows = [torch.cat([torch.arange(share.start, share.stop) for share in own]) for own in shares]
        for rank, own in enumerate(rows):
            order_T[own] = torch.arange(len(own)) + rank * padded_count
        own_spans = list(_own_spans(pieces, shares[ranks.rank]))
        return cls(own_spans, padded_count, rows[ranks.rank].to(device), order_T.to(device))

    def own(self, x_T: Tensor) -> Tensor:
        """Return [N, ...], the rows of this rank, padded with zeros."""
        return pad_rows(x_T.index_select(0, self.own_R), self.row_count)


class RowRanks(Protocol):
    """Ranks that divide the rows of each pass, and exchange rows in attention. Implemented in `twinkle.parallel`."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def for_attention(self, layout: RowLayout, sequences: PackedSequences) -> Any:
        """Return the object that the attention layers receive in place of the sequences.

        Raises:
            PackError: a sequence has a cache.
        """
        ...

    def all_rows(self, own_ND: Tensor, layout: RowLayout) -> Tensor:
        """Return [T, D], the rows of all ranks in the order of the pass; every rank must call it.

        The gradient of the result must be equal on all ranks.
        """
        ...


def rank_row_count(row_counts: Sequence[int], size: int, widths: set[int]) -> int:
    """Return the number of rows that each of `size` ranks runs, with padding, for adapters with `row_counts` rows."""
    counts = [sum(len(_share(0, count, rank=rank, size=size)) for count in row_counts) for rank in range(size)]
    return padded_row_count(max(counts), widths)


def _pieces(row_count: int, adapters: Sequence[AdapterSpan]) -> Iterator[AdapterSpan]:
    """Yield the spans, and spans without an adapter for the rows between them."""
    row = 0
    for span in [*adapters, AdapterSpan(row_count, row_count, None)]:
        if row < span.begin_row:
            yield AdapterSpan(row, span.begin_row, None)
        if span.begin_row < span.end_row:
            yield span
        row = span.end_row


def _share(begin: int, end: int, *, rank: int, size: int) -> range:
    """Return the rows of `[begin, end)` that a rank runs."""
    count = end - begin
    return range(begin + count * rank // size, begin + count * (rank + 1) // size)


def _own_spans(pieces: Sequence[AdapterSpan], shares: Sequence[range]) -> Iterator[AdapterSpan]:
    """Yield the adapter spans of one rank, with rows numbered from 0."""
    row = 0
    for piece, share in zip(pieces, shares, strict=True):
        if share:
            begin, end = share.start - piece.begin_row, share.stop - piece.begin_row
            dropout = piece.dropout
            if dropout is not None:
                dropout = dropout.of_rows(begin, end, row_count=piece.end_row - piece.begin_row)
            yield AdapterSpan(row, row + len(share), piece.adapter, dropout)
        row += len(share)
