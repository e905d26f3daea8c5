"""LoRA in vLLM's layers on a CPU, for vLLM 0.32. `patches` replaces vLLM's methods with methods of this module.

While every slot is in use, vLLM's own methods apply the last slot's adapter to rows of the base model. They also
multiply each row separately, at the maximum rank. This module multiplies the rows of an adapter together, at the
adapter's rank. For few rows, as in a step that samples, one product covers all parts of a layer, such as the
projections of queries, keys and values. The product uses float32 copies of the first factors, and adapters share
products. Float32 is used because torch multiplies few bfloat16 rows slowly. In bfloat16, the results for few rows
therefore differ by rounding from the results for many rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper import punica_cpu

FEW_ROWS = 64
"""Number of rows of an adapter up to which its float32 copies are faster than its factors in the model's type."""

_MIN_STACKED = 4
"""Minimum number of adapters for which a batched product is faster than one product per adapter."""
_MAX_PADDING = 1.5
"""Maximum number of rows of a batched product, relative to the adapters' rows."""

_stock_update_metadata = punica_cpu.PunicaWrapperCPU.update_metadata


@dataclass(frozen=True)
class _Part:
    """One part of a layer's output that an adapter changes."""

    index: int
    """Index of the part in the layer."""
    columns: slice
    """Columns of the layer's output."""
    ranks: slice
    """Columns of the part in the product with the first factors."""
    b_KO: Tensor
    """Second factor, float32 [rank, outputs of the part]."""


@dataclass(frozen=True)
class LayerFactors:
    """Float32 copies of an adapter's factors in one layer, without the parts that the adapter does not change.

    Legend: I inputs of the layer, K sum of the ranks of all parts.
    """

    a_IK: Tensor
    parts: tuple[_Part, ...]

    @classmethod
    def of(
        cls, slot: int, a_stacked: tuple[Tensor, ...], b_stacked: tuple[Tensor, ...], widths: tuple[int, ...]
    ) -> 'LayerFactors':
        """Copy the factors of a slot; see `add_lora_linear` for the arguments."""
        firsts: list[Tensor] = []
        parts: list[_Part] = []
        begin = position = 0
        for index, (a, b, width) in enumerate(zip(a_stacked, b_stacked, widths, strict=True)):
            a_RI, b_OR = a[slot, 0], b[slot, 0, :width]
            if rank := own_rank(a_RI, b_OR):
                firsts.append(a_RI[:rank].float())
                second = b_OR[:, :rank].float().t().contiguous()
                parts.append(_Part(index, slice(begin, begin + width), slice(position, position + rank), second))
                position += rank
            begin += width
        return cls(torch.cat(firsts).t().contiguous() if firsts else torch.empty(0), tuple(parts))

    def add_to(self, y: Tensor, x: Tensor, rows: 'slice | Tensor', *, scale: float) -> None:
        """Add the update to the adapter's rows of `y`, in float32."""
        products_RK = x[rows].float() @ self.a_IK
        target = y[rows]
        sums = target.float()
        for part in self.parts:
            sums[:, part.columns].addmm_(products_RK[:, part.ranks], part.b_KO, alpha=scale)
        if sums is not target or not isinstance(rows, slice):
            y[rows] = sums.to(y.dtype)


@dataclass(frozen=True)
class StackedRows:
    """Rows of several adapters in batched products, in which each adapter has the same number of rows.

    Legend: N adapters, M rows of each adapter, R all rows of the adapters in the step.
    """

    slots: tuple[int, ...]
    """Slot of each of the N adapters; some adapters may have no rows in this step."""
    inputs: Tensor
    """int64 [N * M]. Index in the step of each row's input; padding rows have index 0."""
    used_R: Tensor | None
    """Positions of the step's rows among the N * M rows; None if all N * M rows are rows of the step."""
    targets_R: 'Tensor | slice'
    """Index of each row in the step."""

    @classmethod
    def of(cls, groups: 'list[tuple[int, int, slice | Tensor]]', earlier: tuple[int, ...]) -> 'StackedRows | None':
        """Return the rows of a step; None if a product for each adapter is faster.

        Args:
            groups: result of `adapter_rows`.
            earlier: slots of the previous batched products, which are kept if they include the slots of this step.
        """
        counts = {slot: count for slot, count, _ in groups}
        total, most = sum(counts.values()), max(counts.values(), default=0)
        if len(counts) < _MIN_STACKED or total > FEW_ROWS:
            return None
        is_kept = counts.keys() <= set(earlier) and len(earlier) * most <= _MAX_PADDING * total
        slots = earlier if is_kept else tuple(counts)
        if len(slots) * most > _MAX_PADDING * total:
            return None
        inputs_NM = torch.zeros(len(slots), most, dtype=torch.long)
        for slot, count, rows in groups:
            indices = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            inputs_NM[slots.index(slot), :count] = indices
        inputs = inputs_NM.flatten()
        counts_N1 = torch.tensor([[counts.get(slot, 0)] for slot in slots])
        used_R = (torch.arange(most) < counts_N1).flatten().nonzero().squeeze(1)
        targets_R = inputs[used_R]
        begin = int(targets_R[0])
        is_ordered = torch.equal(targets_R, torch.arange(begin, begin + total))
        return cls(
            slots,
            inputs,
            used_R if total < len(inputs) else None,
            slice(begin, begin + total) if is_ordered else targets_R,
        )


@dataclass(frozen=True)
class StackedFactors:
    """Float32 copies of the factors of N adapters that change the same parts of one layer with the same ranks."""

    a_NIK: Tensor
    parts: tuple[_Part, ...]
    """Parts of the first adapter."""
    b_NKO: tuple[Tensor, ...]
    """Second factors of each part."""

    @classmethod
    def of(cls, factors: list[LayerFactors]) -> 'StackedFactors | None':
        """Return the stacked factors of several adapters; None if their shapes differ, or if they change nothing."""
        shapes = {tuple((part.columns.start, part.ranks.start, part.ranks.stop) for part in f.parts) for f in factors}
        if len(shapes) != 1 or not factors[0].parts:
            return None
        seconds = zip(*(one.parts for one in factors), strict=True)
        return cls(
            torch.stack([one.a_IK for one in factors]),
            factors[0].parts,
            tuple(torch.stack([part.b_KO for part in parts]) for parts in seconds),
        )

    def add_to(self, y: Tensor, x: Tensor, rows: StackedRows, *, scale: float) -> None:
        """Add the updates to the adapters' rows of `y`, in float32."""
        x_NMI = x[rows.inputs].float().view(len(rows.slots), -1, x.shape[1])
        products_NMK = x_NMI @ self.a_NIK
        target = y[rows.targets_R]
        sums = target.float()
        for part, b_NKO in zip(self.parts, self.b_NKO, strict=True):
            update = (products_NMK[:, :, part.ranks] @ b_NKO).flatten(0, 1)
            sums[:, part.columns].add_(update if rows.used_R is None else update[rows.used_R], alpha=scale)
        if sums is not target or not isinstance(rows.targets_R, slice):
            y[rows.targets_R] = sums.to(y.dtype)


def own_rank(a_RI: Tensor, b_OR: Tensor) -> int:
    """Return the rank of the adapter in a slot, whose factors are padded with zeros; 0 if B is zero and A is finite.

    Args:
        a_RI: [maximum rank, inputs].
        b_OR: [outputs, maximum rank].
    """
    if not b_OR.any() and a_RI.isfinite().all():
        return 0
    used = (a_RI != 0).any(1) | (b_OR != 0).any(0)
    return int(used.nonzero()[-1]) + 1


def discard_factors(manager: Any, slot: int | None = None) -> None:
    """Discard the copies of a slot's factors, or of all slots; call it before a slot is filled."""
    for wrapper in manager.punica_wrapper_mapping.values():
        copies: dict[int, Any] = getattr(wrapper, 'twinkle_factors', {})
        stacks: dict[int, Any] = getattr(wrapper, 'twinkle_stacks', {})
        stacks.clear()
        if slot is None:
            copies.clear()
        else:
            copies.pop(slot, None)


def update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
    """Compute the rows of each adapter once per step, for use by all layers."""
    _stock_update_metadata(self, *args, **kwargs)
    set_rows(self, self.token_lora_indices)


def set_rows(self: Any, slots_T: Tensor) -> None:
    """Set the rows of a step in vLLM's wrapper, from the slot of each of the T rows, -1 for the base model."""
    if not hasattr(self, 'twinkle_factors'):
        self.twinkle_factors, self.twinkle_stacks, self.twinkle_stacked_slots = {}, {}, ()
    self.twinkle_rows = adapter_rows(slots_T)
    self.twinkle_stacked = StackedRows.of(self.twinkle_rows, self.twinkle_stacked_slots)
    if self.twinkle_stacked and self.twinkle_stacked.slots != self.twinkle_stacked_slots:
        self.twinkle_stacked_slots = self.twinkle_stacked.slots
        self.twinkle_stacks.clear()


def adapter_rows(slots_T: Tensor) -> list[tuple[int, int, 'slice | Tensor']]:
    """Return the slot, the number of rows, and the rows of each adapter in a batch, without rows of the base model.

    Args:
        slots_T: slot of each of the T rows, -1 for the base model.
    """
    groups: list[tuple[int, int, slice | Tensor]] = []
    for slot in slots_T.unique().tolist():
        if slot < 0:
            continue
        rows = (slots_T == slot).nonzero().squeeze(1)
        begin, end = int(rows[0]), int(rows[-1]) + 1
        groups.append((slot, len(rows), slice(begin, end) if end - begin == len(rows) else rows))
    return groups


def add_lora_linear(
    self: Any, y: Tensor, x: Tensor, a_stacked: tuple[Tensor, ...], b_stacked: tuple[Tensor, ...], *rest: Any, **_: Any
) -> None:
    """Add each adapter's update to its rows of `y`.

    Legend: T rows of a step, R rows of one adapter, I inputs of the layer, O outputs of one part.

    Args:
        self: vLLM's wrapper.
        y: [T, outputs], modified in place.
        x: [T, I].
        a_stacked: [slots, 1, rank, I] for each part of the output.
        b_stacked: [slots, 1, O, rank] for each part of the output.
        rest: vLLM's scale, which is 1 because B is already scaled, and the width of each part.
    """
    if not self.twinkle_rows:
        return
    scale, widths = rest[:2]
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    if stack := _stack(self, a_stacked, b_stacked, widths):
        stack.add_to(y, x, self.twinkle_stacked, scale=scale)
        return
    for slot, count, rows in self.twinkle_rows:
        factors = _factors(self, slot, a_stacked, b_stacked, widths)
        if not factors.parts:
            continue
        if count <= FEW_ROWS or a_stacked[0].dtype == torch.float32:
            factors.add_to(y, x, rows, scale=scale)
            continue
        x_RI = x[rows].to(a_stacked[0].dtype)
        for part in factors.parts:
            rank = len(part.b_KO)
            a_KI, b_OK = a_stacked[part.index][slot, 0, :rank], b_stacked[part.index][slot, 0, :, :rank]
            update_RO = (x_RI @ a_KI.t()) @ b_OK[: part.columns.stop - part.columns.start].t()
            y[rows, part.columns] += (update_RO * scale if scale != 1.0 else update_RO).to(y.dtype)


def _stack(self: Any, a_stacked: Any, b_stacked: Any, widths: Any) -> StackedFactors | None:
    """Return the stacked copies of the step's adapters in one layer; None if they are multiplied separately."""
    if self.twinkle_stacked is None:
        return None
    stacks: dict[int, StackedFactors | None] = self.twinkle_stacks
    layer = a_stacked[0].data_ptr()
    if layer not in stacks:
        slots = self.twinkle_stacked.slots
        stacks[layer] = StackedFactors.of([_factors(self, slot, a_stacked, b_stacked, widths) for slot in slots])
    return stacks[layer]


def _factors(self: Any, slot: int, a_stacked: Any, b_stacked: Any, widths: Any) -> LayerFactors:
    """Return the copies of a slot's factors in one layer; make them at their first use."""
    layers: dict[int, LayerFactors] = self.twinkle_factors.setdefault(slot, {})
    layer = a_stacked[0].data_ptr()
    if layer not in layers:
        layers[layer] = LayerFactors.of(slot, a_stacked, b_stacked, tuple(widths))
    return layers[layer]
