"""Low-rank updates of all spans of a layer in six grouped matrix products, for accelerators.

A loop launches six kernels per span and layer; a grouped product is one launch for any number of spans. LoRA ranks
are padded to a common rank. Rows outside all spans belong to groups whose weights are zero. The update is rounded once
more than in the loop, because a grouped product cannot add in place.

Legend: T rows of the pack, G groups, R padded rank, I inputs and O outputs of the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from twinkle.nn.active_adapters import LayerSpan
from twinkle.nn.lora_factors import LoraFactors

_RANK_MULTIPLE = 8
"""Divisor of the widths of a layer and of padded LoRA ranks, because rows of a 16-bit matrix must start at multiples of
16 bytes."""


def is_groupable(spans: Sequence[LayerSpan], x_TI: Tensor) -> bool:
    """Return whether all spans are LoRA, with a dtype and widths that grouped products support."""
    if not hasattr(torch.nn.functional, 'grouped_mm') or x_TI.dtype != torch.bfloat16:
        return False
    updates = [span.update for span in spans]
    if not all(isinstance(update, LoraFactors) for update in updates):
        return False
    widths = (updates[0].a.shape[1], updates[0].b.shape[0])
    return all(width % _RANK_MULTIPLE == 0 for width in widths)


class GroupedLora:
    """Counterpart of `SpanLoop` for LoRA, with one kernel launch per product."""

    def add_output(self, spans: Sequence[LayerSpan], x_TI: Tensor, y_TO: Tensor) -> list[Tensor]:
        """Add each span's update to its rows of `y_TO` in place; return the tensors that `add_gradient` needs."""
        groups = _Groups.of(spans, x_TI)
        z_TR = groups.product(_dropped(spans, x_TI), groups.a_GRI.transpose(1, 2))
        y_TO += groups.product(z_TR, groups.scaled_b_GOR.transpose(1, 2))
        return [z_TR]

    def add_gradient(
        self, spans: Sequence[LayerSpan], x_TI: Tensor, dy_TO: Tensor, dx_TI: Tensor | None, saved: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Add each span's gradient to its rows of `dx_TI` in place; return all parameters' gradients, in order."""
        (z_TR,) = saved
        groups = _Groups.of(spans, x_TI)
        dz_TR = groups.product(dy_TO, groups.scaled_b_GOR)
        da_GRI = groups.product(dz_TR.t(), _dropped(spans, x_TI))
        db_GOR = groups.product(dy_TO.t(), z_TR)
        if dx_TI is not None:
            dx_TI += _masked(spans, groups.product(dz_TR, groups.a_GRI))
        gradients: list[Tensor | None] = []
        for index, span in zip(groups.indices, spans, strict=True):
            a, b = span.update.parameters()
            rank = a.shape[0]
            gradients.append(da_GRI[index, :rank].to(a.dtype) if a.requires_grad else None)
            gradients.append(db_GOR[index, :, :rank].to(b.dtype) * span.update.scaling if b.requires_grad else None)
        return gradients


@dataclass(frozen=True)
class _Groups:
    """Weights stacked by group, and the end row of each group."""

    a_GRI: Tensor
    scaled_b_GOR: Tensor
    ends_G: Tensor
    indices: Sequence[int]
    """Group index of each span."""

    @classmethod
    def of(cls, spans: Sequence[LayerSpan], x_TI: Tensor) -> '_Groups':
        ends: list[int] = []
        indices: list[int] = []
        row = 0
        for span in spans:
            if span.begin_row > row:
                ends.append(span.begin_row)
            indices.append(len(ends))
            ends.append(span.end_row)
            row = span.end_row
        if row < x_TI.shape[0]:
            ends.append(x_TI.shape[0])
        ranks = [span.update.a.shape[0] for span in spans]
        padded = -(-max(ranks) // _RANK_MULTIPLE) * _RANK_MULTIPLE
        a_GRI = x_TI.new_zeros((len(ends), padded, x_TI.shape[1]))
        b_GOR = x_TI.new_zeros((len(ends), spans[0].update.b.shape[0], padded))
        updates = [span.update for span in spans]
        places = [*zip(indices, ranks, strict=True)]
        b = [update.b.detach() for update in updates]
        scaled = torch._foreach_mul(b, [update.scaling for update in updates])  # noqa: SLF001 - torch has no public name
        torch._foreach_copy_([a_GRI[index, :rank] for index, rank in places], [update.a.detach() for update in updates])
        torch._foreach_copy_([b_GOR[index, :, :rank] for index, rank in places], scaled)
        return cls(a_GRI, b_GOR, _ends_on(x_TI.device, tuple(ends)), indices)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the products of all groups.

        A three-dimensional `right` has one matrix per group, by which the group's rows of `left` are multiplied. With a
        two-dimensional `right`, the group's columns of `left` are multiplied by the group's rows of `right`.
        """
        return torch.nn.functional.grouped_mm(left, right, offs=self.ends_G)


@lru_cache(maxsize=16)
def _ends_on(device: torch.device, ends: tuple[int, ...]) -> Tensor:
    """Return the end rows on a device; cached for all layers of a pass, because each copy waits for the device."""
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _dropped(spans: Sequence[LayerSpan], x_TI: Tensor) -> Tensor:
    return x_TI if all(span.dropout is None for span in spans) else _masked(spans, x_TI.clone())


def _masked(spans: Sequence[LayerSpan], x_TI: Tensor) -> Tensor:
    for span in spans:
        if span.dropout is not None:
            rows = slice(span.begin_row, span.end_row)
            x_TI[rows] *= span.dropout.mask(x_TI[rows])
    return x_TI
