"""Common prefixes of the sequences of a batch, whose rows a pass computes once.

Prompts of groups of samples or of preference pairs, earlier turns of a conversation, and system prompts are prefixes of
several sequences. The sequences form a tree of any depth: each span of rows continues its parent. Two rows are equal
if they and all rows before them in their sequences have the same tokens and positions, and the same routed experts if
the batch contains them. Sequences with media share no rows.

Legend: T rows of the batch, N rows that are computed, C integers that identify a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import starmap

import numpy as np

from twinkle.processor.packed_batch import Ints, PackedBatch

MIN_SHARED_ROWS = 16
"""Minimum number of equal rows that are shared. Fewer rows cost less than an additional kernel call."""


@dataclass(frozen=True)
class TreeSpan:
    """Rows `[begin_row, end_row)` of the computed rows, which continue the span `parent`, if any."""

    begin_row: int
    end_row: int
    parent: int | None = None


@dataclass(frozen=True)
class PrefixTree:
    """Rows of one batch that a pass computes; the rows of each common prefix occur once."""

    rows_N: Ints
    """int64 [N]: rows of the batch that are computed, ascending."""
    computed_T: Ints
    """int64 [T]: index in `rows_N` of the computed row that has the result of each row of the batch."""
    spans: tuple[TreeSpan, ...]
    """Spans that cover the computed rows in order; parents come before the spans that continue them."""

    @property
    def row_count(self) -> int:
        """Number of computed rows."""
        return len(self.rows_N)

    @classmethod
    def unshared(cls, batch: PackedBatch) -> 'PrefixTree':
        """Return the tree that computes every row of a batch."""
        rows_T = np.arange(batch.token_count)
        return cls(rows_T, rows_T, tuple(starmap(TreeSpan, batch.sequence_bounds)))

    @classmethod
    def of(cls, batch: PackedBatch) -> 'PrefixTree':
        """Return the tree of the common prefixes of a batch.

        Fewer than `MIN_SHARED_ROWS` equal rows, before a branch or at the end of a sequence, may be computed again.
        """
        builder = PrefixTreeBuilder(batch)
        for begin, end in batch.sequence_bounds:
            builder.add(begin, end)
        return builder.tree()


@dataclass(eq=False)
class _Node:
    """Rows `[begin, end)` of the batch, in the sequence that had them first."""

    begin: int
    end: int
    parent: '_Node | None'
    children: 'list[_Node]' = field(default_factory=list)
    """Nodes that continue this node."""
    by_first_rows: 'dict[bytes, _Node]' = field(default_factory=dict)
    """Children by their first `MIN_SHARED_ROWS` rows."""
    short_child: '_Node | None' = None
    """Child with fewer than `MIN_SHARED_ROWS` rows that has children. At most one, because only a split creates it."""


class PrefixTreeBuilder:
    """Adds the sequences of a batch to a tree, one after another.

    Args:
        batch: batch with the sequences.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self._rows_TC = _identities(batch)
        self._owner_T = np.full(batch.token_count, -1)
        """Row of the batch that is computed in the place of each added row; -1 for rows that were not added."""
        self.restart()

    def restart(self) -> None:
        """Begin a new tree: sequences that are added from now on share no rows with earlier sequences."""
        self._root = _Node(0, 0, None)
        self._nodes: list[_Node] = []

    def add(self, begin: int, end: int) -> int:
        """Add the sequence in the rows `[begin, end)`; return the number of rows that must be computed for it.

        Each sequence is added once.
        """
        node, row = self._root, begin
        while (child := self._child_for(node, row, end)) is not None:
            count = self._equal_count(child, row, end)
            if row + count < end and child.begin + count < child.end:
                self._split(child, count)
            self._owner_T[row : row + count] = np.arange(child.begin, child.begin + count)
            row += count
            node = child
        if row < end:
            self._owner_T[row:end] = np.arange(row, end)
            self._insert(_Node(row, end, node), node)
        return end - row

    def tree(self) -> PrefixTree:
        """Return the tree of the added sequences, which must be all sequences of the batch."""
        rows_N = np.flatnonzero(self._owner_T == np.arange(len(self._owner_T)))
        # The rows of a parent come before its children's rows, because an earlier or the same sequence has them.
        nodes = sorted(self._nodes, key=lambda node: node.begin)
        index_of = {id(node): index for index, node in enumerate(nodes)}
        begins = np.searchsorted(rows_N, [node.begin for node in nodes]).tolist()
        spans = tuple(
            TreeSpan(begin, begin + node.end - node.begin, index_of.get(id(node.parent)))
            for begin, node in zip(begins, nodes, strict=True)
        )
        return PrefixTree(rows_N, np.searchsorted(rows_N, self._owner_T), spans)

    def _key(self, begin: int, end: int) -> bytes:
        """Return the first rows of a node as bytes; empty if it has too few rows. No node has the empty key."""
        return self._rows_TC[begin : begin + MIN_SHARED_ROWS].tobytes() if end - begin >= MIN_SHARED_ROWS else b''

    def _child_for(self, node: _Node, begin: int, end: int) -> _Node | None:
        """Return the child that the rows of a sequence continue, or None if no child shares enough rows."""
        short = node.short_child
        if short is not None and self._equal_count(short, begin, end) == short.end - short.begin:
            return short
        return node.by_first_rows.get(self._key(begin, end))

    def _equal_count(self, node: _Node, begin: int, end: int) -> int:
        count = min(node.end - node.begin, end - begin)
        own, other = (self._rows_TC[first : first + count] for first in (node.begin, begin))
        differs = (own != other).any(axis=1)
        return int(differs.argmax()) if differs.any() else count

    def _split(self, node: _Node, count: int) -> None:
        """Divide a node after `count` rows."""
        rest = _Node(node.begin + count, node.end, node, node.children, node.by_first_rows, node.short_child)
        for child in rest.children:
            child.parent = rest
        is_short = rest.end - rest.begin < MIN_SHARED_ROWS
        node.short_child = rest if is_short and rest.children else None
        node.end, node.children, node.by_first_rows = rest.begin, [], {}
        self._insert(rest, node)

    def _insert(self, node: _Node, parent: _Node) -> None:
        self._nodes.append(node)
        parent.children.append(node)
        if key := self._key(node.begin, node.end):
            parent.by_first_rows[key] = node


def _identities(batch: PackedBatch) -> Ints:
    """Return int64 [T, C]. Rows have equal results if they and all rows before them in their sequences are equal."""
    columns = [batch.input_ids_T[:, None], np.atleast_2d(batch.position_ids_T).T]
    if batch.routed_experts_TLA is not None:
        columns.append(batch.routed_experts_TLA.reshape(batch.token_count, -1))
    if batch.media:
        columns.append(_media_sequences(batch.sequence_bounds, [media.begin_row for media in batch.media])[:, None])
    return np.ascontiguousarray(np.concatenate(columns, axis=1, dtype=np.int64))


def _media_sequences(bounds: tuple[tuple[int, int], ...], media_rows: Iterable[int]) -> Ints:
    """Return int64 [T]: a number that is different for each sequence with media, and 0 for sequences of text only."""
    begins = np.array([begin for begin, _ in bounds])
    numbers = np.zeros(len(bounds), np.int64)
    used = np.unique(np.searchsorted(begins, list(media_rows), side='right') - 1)
    numbers[used] = used + 1
    return np.repeat(numbers, [end - begin for begin, end in bounds])
