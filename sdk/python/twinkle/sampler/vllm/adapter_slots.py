"""Adapters in a vLLM worker: files in mapped memory, copied into a slot when a request needs the adapter.

Loading a version only maps its file, and activating it is one batched copy of all factors into a slot. vLLM's default
is slower, because it creates an object for each layer, and clears and fills the layers one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from twinkle.sampler.vllm.plans import LayerPlan, Plan, TensorLocation


@dataclass(frozen=True)
class VllmAdapter:
    """One immutable version of one adapter in an engine."""

    key: str
    """Name of the adapter."""
    version: int
    """Version number, at least 1."""
    lora_id: int
    """vLLM's id of the version; never reused."""


@dataclass(frozen=True)
class _Slot:
    """Views of one slot's memory for the factors of a plan, in the plan's order."""

    plan: Plan
    """The plan, compared by identity. The reference keeps it alive."""
    a: Sequence[Tensor]
    b: Sequence[Tensor]


class MappedAdapter(LoRAModel):
    """An adapter whose factors are in mapped memory, registered with vLLM.

    Args:
        lora_id: vLLM's id of the version.
        plan: positions of the factors.
        buffer: uint8 [bytes], the mapped file; not copied.
    """

    def __init__(self, lora_id: int, plan: Plan, buffer: Tensor) -> None:
        super().__init__(lora_id, plan.rank, {})
        self.plan = plan
        self.buffer = buffer


class Slots:
    """Copies mapped adapters into the slots of vLLM's adapter manager, for a model on a single rank."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._slots: dict[int, _Slot] = {}

    def fill(self, slot: int, adapter: MappedAdapter) -> None:
        """Copy an adapter into a slot. For mapped adapters, the scaling factors are applied only here."""
        plan = adapter.plan
        # The entry is absent until the slot is filled, because a failed copy leaves an unknown state.
        target = self._slots.pop(slot, None)
        if target is None or target.plan is not plan:
            # The previous adapter may have factors in layers that this adapter does not overwrite.
            for module in self._manager.modules.values():
                module.reset_lora(slot)
            target = self._slot_for(slot, plan)
        layers = _layers_of(plan)
        torch._foreach_copy_(target.a, _views([layer.a for layer in layers], adapter.buffer))
        b = _views([layer.b for layer in layers], adapter.buffer)
        if any(layer.b.dtype != target.b[0].dtype for layer in layers):
            # Scaling in float32 rounds only once.
            b = [factor.float() for factor in b]
        torch._foreach_copy_(target.b, torch._foreach_mul(b, [layer.scaling for layer in layers]))  # noqa: SLF001 - torch has no public name
        self._slots[slot] = target

    def _slot_for(self, slot: int, plan: Plan) -> _Slot:
        targets = [
            (layer, self._manager.modules[name], part)
            for name, parts in plan.modules.items()
            for part, layer in enumerate(parts)
            if layer is not None
        ]
        return _Slot(
            plan,
            [module.lora_a_stacked[part][_corner(slot, layer.a)] for layer, module, part in targets],
            [module.lora_b_stacked[part][_corner(slot, layer.b)] for layer, module, part in targets],
        )


def _corner(slot: int, location: TensorLocation) -> tuple[int | slice, ...]:
    """Return the index of a factor in a stack [slots, 1, rows, columns], whose slots may be larger than the factor."""
    return (slot, 0, *map(slice, location.shape))


def _layers_of(plan: Plan) -> list[LayerPlan]:
    return [layer for parts in plan.modules.values() for layer in parts if layer is not None]


def _views(locations: Sequence[TensorLocation], buffer: Tensor) -> list[Tensor]:
    """Return views of all tensors. If all are aligned and have one dtype, the buffer is cast only once."""
    dtype = locations[0].dtype
    if not all(location.is_aligned and location.dtype == dtype for location in locations):
        return [location.view(buffer) for location in locations]
    elements = buffer[: len(buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
    return [location.view_typed(elements) for location in locations]


def is_whole(manager: Any, plan: Plan) -> bool:
    """Return whether `Slots` can fill the plan's layers: each is on one rank, with one stack of slots per part."""
    return all(
        manager.modules[name].tp_size == 1 and len(manager.modules[name].lora_a_stacked) == len(parts)
        for name, parts in plan.modules.items()
    )


def build_model(manager: Any, plan: Plan, buffer: Tensor, lora_id: int) -> LoRAModel:
    """Return the adapter in vLLM's format. Factors that need no conversion or scaling are views of `buffer`."""
    dtype = manager.lora_config.lora_dtype
    loras: dict[str, LoRALayerWeights] = {}
    for name, plans in plan.modules.items():
        factors = [_factors(item, buffer, dtype) for item in plans]
        if name not in manager.packed_modules:
            a, b = factors[0]
            loras[name] = LoRALayerWeights(name, plan.rank, plan.rank, a, b, scaling=1.0)
            continue
        loras[name] = PackedLoRALayerWeights(
            name,
            plan.rank,
            [plan.rank] * len(factors),
            [a for a, _ in factors],
            [b for _, b in factors],
            scaling=[1.0] * len(factors),
        )
    return LoRAModel(lora_id, plan.rank, loras)


def _factors(plan: LayerPlan | None, buffer: Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return A and scaled B. For adapters in vLLM's format, the scaling factor is applied only here."""
    if plan is None:
        return None, None
    b = plan.b.view(buffer)
    if plan.scaling != 1.0:
        # Scaling in float32 rounds a bfloat16 B only once.
        b = b.float() * plan.scaling
    return plan.a.view(buffer).to(dtype), b.to(dtype)
