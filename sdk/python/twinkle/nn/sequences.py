"""Sequences of a pack, and the kernel calls in which they attend.

Two sequences with a common prefix can share its rows (`SequenceSpan.parent`) and still get, bitwise, the results of
separate sequences. For this, the results of a row must not depend on the number of later keys. On a CPU, this is true
for calls with the padded shapes of this module. The constants were measured (docs/LOG.md, 2026-11-29 and 2026-11-30),
and `twinkle.nn.probe` checks them when a model is loaded. On accelerators, nothing is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinkle.nn.spans import SequenceSpan

_ROW_MULTIPLE = 16
"""Rows and keys are padded to multiples of this number, because the kernel rounds those after the last multiple
differently. The first row of a call is at such a multiple in its sequence."""
UNSPLIT_KEYS = 192
KEY_BLOCK = 512
"""More than `UNSPLIT_KEYS` keys are padded to a multiple of `KEY_BLOCK`, the number of keys that the kernel handles at
once. MKL adds the parts of a long sum separately, and the number of terms decides where the parts end. Without padding,
a row with 300 keys would therefore change if later keys were added. On Intel CPUs, sums of up to 384 terms have one
part; on AMD Zen 5, sums of up to 192 terms."""
_MASKED_ROWS = 256
"""Maximum number of rows of a call with a mask. Such a call computes all of its keys, including masked ones, so the
rows are divided among calls that leave out most masked keys."""


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

    @classmethod
    def of(cls, begin: int, length: int, multiple: int) -> 'CallShape':
        """Return the padded shape for `length` rows from the position `begin` on."""
        front, end = begin % multiple, begin + length
        key_multiple = KEY_BLOCK if multiple > 1 and end > UNSPLIT_KEYS else multiple
        # -(-a // b) * b is the smallest multiple of b that is at least a.
        return cls(
            begin - front, front, -(-(front + length) // multiple) * multiple, -(-end // key_multiple) * key_multiple
        )


@dataclass(frozen=True)
class KernelCall:
    """Sequences that attend in one call."""

    shape: CallShape
    span_indexes: Sequence[int]
    """Indexes of the spans. Spans with the same parents are adjacent."""


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of one pass; every attention layer of the pass receives the same object. Create it with `of`."""

    spans: Sequence[SequenceSpan]
    row_multiple: int
    """Number by which rows and keys are padded; 1 pads nothing."""
    lengths: Sequence[int]
    """Number of rows of each span."""
    parents: Sequence[tuple[int, ...]]
    """Indexes of the spans that each span continues, from the beginning of the sequence."""
    begins: Sequence[int]
    """Position of the first row of each span in its sequence, without the tokens of a cache."""
    cached: Sequence[int]
    """Indexes of the spans with a cache."""
    calls: Sequence[KernelCall]
    """Calls for all spans without a cache. Spans of equal shape share a call.

    The kernel's results for a span are bitwise independent of the number of spans in a call. The spans of an adapter
    have the same order in any pack, because autograd adds the gradients of shared rows in this order.
    """
    _masks: dict[tuple[CallShape, int | None, torch.dtype], Tensor] = field(default_factory=dict)
    """Masks of the pass, which all layers reuse."""

    @classmethod
    def of(cls, spans: Sequence[SequenceSpan], weight: Tensor) -> 'PackedSequences':
        """Arrange the spans of a pass.

        Args:
            spans: spans that cover all rows in order; see `twinkle.nn.spans.check_spans`.
            weight: a weight of the model, whose device determines how shapes are padded.
        """
        multiple = _ROW_MULTIPLE if weight.device.type == 'cpu' else 1
        parents: list[tuple[int, ...]] = []
        lengths, begins, cached = list[int](), list[int](), list[int]()
        groups: dict[CallShape, list[tuple[tuple[int, ...], int]]] = {}
        for index, span in enumerate(spans):
            parent = span.parent
            parents.append(() if parent is None else (*parents[parent], parent))
            begins.append(0 if parent is None else begins[parent] + lengths[parent])
            lengths.append(span.end_row - span.begin_row)
            if span.cache is None:
                shape = CallShape.of(begins[index], lengths[index], multiple)
                groups.setdefault(shape, []).append((parents[index], index))
            else:
                cached.append(index)
        calls: list[KernelCall] = []
        for shape, group in sorted(groups.items()):
            _, indexes = zip(*sorted(group), strict=True)
            calls.append(KernelCall(shape, indexes))
        return cls(spans, multiple, lengths, parents, begins, cached, calls)

    def masked_blocks(
        self, shape: CallShape, *, window: int | None, like: Tensor
    ) -> Sequence[tuple[CallShape, Tensor]]:
        """Return the masks of a call, in blocks of rows that need fewer keys than all rows together.

        Args:
            shape: shape of the call.
            window: number of last positions to which a row attends; None for all.
            like: tensor with the dtype and device of the queries.

        Returns:
            Shape and mask of each block, in order. The mask is [rows, keys] in the dtype of the kernel, 0 where a row
            attends to a key and -inf elsewhere. Empty if the rows attend causally from position 0 on.
        """
        if window is not None and shape.before + shape.row_count <= window:
            window = None
        if shape.before == 0 and window is None:
            return ()
        blocks: list[tuple[CallShape, Tensor]] = []
        for begin in range(0, shape.row_count, _MASKED_ROWS):
            row_count, before = min(_MASKED_ROWS, shape.row_count - begin), shape.before + begin
            least = CallShape.of(before, row_count, self.row_multiple)
            block = CallShape(before, 0, row_count, min(shape.key_count, least.key_count))
            blocks.append((block, self._mask(block, window, like)))
        return blocks

    def _mask(self, block: CallShape, window: int | None, like: Tensor) -> Tensor:
        key = (block, window, kernel_dtype(like))
        if key not in self._masks:
            is_visible = _causal_mask(block.before, block.row_count, block.key_count, window=window, device=like.device)
            mask = torch.zeros(is_visible.shape, dtype=kernel_dtype(like), device=like.device)
            self._masks[key] = mask.masked_fill_(~is_visible, float('-inf'))
        return self._masks[key]


def kernel_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which queries, keys or values like `x` attend.

    It is float32 on a CPU, where torch's kernel for half precision is slower, especially in the backward pass.
    """
    return torch.float32 if x.device.type == 'cpu' else x.dtype


def _causal_mask(before: int, row_count: int, key_count: int, *, window: int | None, device: torch.device) -> Tensor:
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
