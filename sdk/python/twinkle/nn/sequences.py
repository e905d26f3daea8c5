"""Sequences of a pack, and the kernel calls in which they attend.

Two sequences with a common prefix can share its rows (`SequenceSpan.parent`) and still get, bitwise, the results of
separate sequences. For this, the results of a row must not depend on the number of later keys. On a CPU, that holds for
calls whose shapes are padded as here; the constants were measured (docs/LOG.md, 2026-11-29). On accelerators, nothing
is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from twinkle.nn.spans import SequenceSpan

_ROW_MULTIPLE, _HALF_ROW_MULTIPLE = 16, 32
"""Rows and keys are padded to multiples of these numbers, in float32 and in half precision, because the kernel rounds
the remainder of other numbers differently. The first row of a call is at such a multiple in its sequence."""
_UNSPLIT_KEYS = 256
_KEY_BLOCK = 512
"""More than `_UNSPLIT_KEYS` keys are padded to a multiple of `_KEY_BLOCK`, the number of keys that the kernel handles
at once. It adds the halves of a block of more than 384 keys separately, so without padding, a row with 300 keys would
change if later keys were added."""
_MASKED_ROWS = 256
"""Maximum number of rows of a call with a mask. Such a call computes all of its keys, also masked ones, so the rows are
divided to leave out most of these."""


@dataclass(frozen=True, order=True)
class CallShape:
    """Shape of one call of the attention kernel."""

    before: int
    """Number of positions of the sequence before the first row of the call."""
    front: int
    """Number of padding rows before the rows of each sequence."""
    row_count: int
    """Number of rows of each sequence, with padding before and after them."""
    key_count: int
    """Number of keys of each sequence, with padding after them."""


@dataclass(frozen=True)
class KernelCall:
    """Sequences that attend in one call."""

    shape: CallShape
    span_indexes: Sequence[int]
    """Indexes of the spans. Spans with the same parents are adjacent."""


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of one pass; every attention layer of the pass receives the same object.

    Args:
        spans: spans that cover all rows in order; see `twinkle.nn.spans.check_spans`.
        row_multiple: number by which rows and keys are padded, see `row_multiple_of`; 1 pads nothing.
    """

    spans: Sequence[SequenceSpan]
    row_multiple: int
    _masks: dict[tuple[CallShape, int | None, torch.dtype], Tensor] = field(default_factory=dict)
    """Masks of the pass, which all layers reuse."""

    @cached_property
    def lengths(self) -> list[int]:
        """Number of rows of each span."""
        return [span.end_row - span.begin_row for span in self.spans]

    @cached_property
    def parents(self) -> list[tuple[int, ...]]:
        """Indexes of the spans that each span continues, from the beginning of the sequence."""
        chains: list[tuple[int, ...]] = []
        for span in self.spans:
            chains.append(() if span.parent is None else (*chains[span.parent], span.parent))
        return chains

    @cached_property
    def begins(self) -> list[int]:
        """Position of the first row of each span in its sequence, without the tokens of a cache."""
        return [sum(self.lengths[index] for index in chain) for chain in self.parents]

    @cached_property
    def cached(self) -> list[int]:
        """Indexes of the spans with a cache."""
        return [index for index, span in enumerate(self.spans) if span.cache is not None]

    @cached_property
    def calls(self) -> list[KernelCall]:
        """Calls for all spans without a cache. Spans of equal shape share a call.

        The kernel's results for a span are bitwise independent of the number of spans in a call. The spans of an
        adapter have the same order in any pack, because autograd adds the gradients of shared rows in this order.
        """
        groups: dict[CallShape, list[int]] = {}
        for index, span in enumerate(self.spans):
            if span.cache is None:
                groups.setdefault(self._shape_of(self.begins[index], self.lengths[index]), []).append(index)
        return [
            KernelCall(shape, sorted(indexes, key=lambda index: (self.parents[index], index)))
            for shape, indexes in sorted(groups.items())
        ]

    def call_of(self, index: int, *, begin: int) -> KernelCall:
        """Return the call of one span whose first row has the position `begin`."""
        return KernelCall(self._shape_of(begin, self.lengths[index]), (index,))

    def _shape_of(self, begin: int, length: int) -> CallShape:
        front = begin % self.row_multiple
        row_count = _rounded_up(front + length, self.row_multiple)
        return CallShape(begin - front, front, row_count, self._padded_keys(begin + length))

    def _padded_keys(self, count: int) -> int:
        is_split = self.row_multiple > 1 and count > _UNSPLIT_KEYS
        return _rounded_up(count, _KEY_BLOCK if is_split else self.row_multiple)

    def masked_blocks(self, call: KernelCall, *, window: int | None, like: Tensor) -> list[tuple[CallShape, Tensor]]:
        """Divide the rows of a call that needs a mask, so that the rows of each block need fewer keys.

        Args:
            call: call of `calls`.
            window: number of last positions to which a row attends; None for all.
            like: tensor whose dtype and device the masks get.

        Returns:
            Shape and mask of each block, in order. The mask is float [rows, keys] in the dtype of `like`, 0 where a row
            attends to a key and -inf elsewhere. Empty if the rows attend causally from position 0 on.
        """
        if window is not None and call.shape.before + call.shape.row_count <= window:
            window = None
        if call.shape.before == 0 and window is None:
            return []
        return [(block, self._mask(block, window, like)) for block in self._blocks(call.shape)]

    def _blocks(self, shape: CallShape) -> list[CallShape]:
        blocks: list[CallShape] = []
        for begin in range(0, shape.row_count, _MASKED_ROWS):
            row_count = min(_MASKED_ROWS, shape.row_count - begin)
            before = shape.before + begin
            blocks.append(CallShape(before, 0, row_count, min(shape.key_count, self._padded_keys(before + row_count))))
        return blocks

    def _mask(self, block: CallShape, window: int | None, like: Tensor) -> Tensor:
        key = (block, window, like.dtype)
        if key not in self._masks:
            is_visible = causal_mask(block.before, block.row_count, block.key_count, window=window, device=like.device)
            mask = torch.zeros(is_visible.shape, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(~is_visible, float('-inf'))
        return self._masks[key]


def row_multiple_of(weight: Tensor) -> int:
    """Return the number by which a model with such weights pads the rows and keys of attention."""
    if weight.device.type != 'cpu':
        return 1
    return _ROW_MULTIPLE if weight.dtype == torch.float32 else _HALF_ROW_MULTIPLE


def causal_mask(before: int, row_count: int, key_count: int, *, window: int | None, device: torch.device) -> Tensor:
    """Return bool [rows, keys], true where a row attends to a key. The first row has the position `before`.

    Args:
        before: number of positions before the first row.
        row_count: number of rows.
        key_count: number of keys, from position 0.
        window: number of last positions to which a row attends; None for all.
        device: device of the result.
    """
    row = torch.arange(before, before + row_count, device=device)[:, None]
    key = torch.arange(key_count, device=device)[None, :]
    mask = key <= row
    if window is not None:
        mask &= key > row - window
    return mask


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
