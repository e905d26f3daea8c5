"""Adapters inside a vLLM worker: mapped memory that is copied into a slot when its turn comes.

Nothing is built when a version arrives: the file stays mapped, and putting it into a slot is one batched copy of
all factors. vLLM's own way makes an object for each layer and zeroes and fills its slots one by one, which took
ten times as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from twinkle.sampler.vllm.plans import LayerPlan, Place, Plan


@dataclass(frozen=True)
class VllmAdapter:
    """One immutable version of one adapter, as an engine knows it."""

    key: str
    """Names the adapter."""
    version: int
    """At least 1."""
    lora_id: int
    """vLLM's number, used once and never again."""


@dataclass(frozen=True)
class _Slot:
    """One slot as a plan fills it: where the factors go, in the plan's order."""

    plan: Plan
    """Kept here, so that no other plan can be taken for it."""
    a: Sequence[Tensor]
    b: Sequence[Tensor]


class MappedAdapter(LoRAModel):
    """An adapter whose factors lie in mapped memory; vLLM keeps it as one of its own."""

    def __init__(self, lora_id: int, plan: Plan, buffer: Tensor) -> None:
        """Keep `buffer`, uint8 [bytes]; nothing is copied."""
        super().__init__(lora_id, plan.rank, {})
        self.plan = plan
        self.buffer = buffer


class Slots:
    """Puts mapped adapters into the slots of vLLM's adapter manager, for a model that is not split over ranks."""

    def __init__(self, manager: Any) -> None:
        """Know nothing of what the slots hold."""
        self._manager = manager
        self._slots: dict[int, _Slot] = {}

    def fill(self, slot: int, adapter: MappedAdapter) -> None:
        """Copy an adapter into a slot; this is the one place where its updates are scaled."""
        plan = adapter.plan
        # Out of the table until it is filled: nobody knows what a copy that failed has left.
        to = self._slots.pop(slot, None)
        if to is None or to.plan is not plan:
            # Another layout leaves factors that this one does not overwrite.
            for module in self._manager.modules.values():
                module.reset_lora(slot)
            to = self._places_of(slot, plan)
        layers = _layers_of(plan)
        torch._foreach_copy_(to.a, _views([layer.a for layer in layers], adapter.buffer))
        b = _views([layer.b for layer in layers], adapter.buffer)
        if any(layer.b.dtype != to.b[0].dtype for layer in layers):
            # Scaled in float32, so that it is rounded once.
            b = [factor.float() for factor in b]
        torch._foreach_copy_(to.b, torch._foreach_mul(b, [layer.scaling for layer in layers]))  # noqa: SLF001 - torch has no other name for it
        self._slots[slot] = to

    def _places_of(self, slot: int, plan: Plan) -> _Slot:
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


def _corner(slot: int, place: Place) -> tuple[int | slice, ...]:
    """Return where a factor lies in a stack, [slots, 1, rows, columns], whose slots have room for larger ones."""
    return (slot, 0, *map(slice, place.shape))


def _layers_of(plan: Plan) -> list[LayerPlan]:
    """Return the layers that a plan has something for, in its order."""
    return [layer for parts in plan.modules.values() for layer in parts if layer is not None]


def _views(places: Sequence[Place], buffer: Tensor) -> list[Tensor]:
    """Return the tensors at all places; for hundreds of small ones, making the views is most of the work."""
    dtype = places[0].dtype
    if not all(place.is_aligned and place.dtype == dtype for place in places):
        return [place.view(buffer) for place in places]
    elements = buffer[: len(buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
    return [place.view_typed(elements) for place in places]


def is_whole(manager: Any, plan: Plan) -> bool:
    """Return whether every layer of a plan lies whole on this rank, one slice for each part."""
    return all(
        manager.modules[name].tp_size == 1 and len(manager.modules[name].lora_a_stacked) == len(parts)
        for name, parts in plan.modules.items()
    )


def build_model(manager: Any, plan: Plan, buffer: Tensor, lora_id: int) -> LoRAModel:
    """Return the adapter as vLLM keeps it; factors alias `buffer` where dtype and scaling allow it."""
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
    """Return A and scaled B; this is the one place where an update is scaled."""
    if plan is None:
        return None, None
    b = plan.b.view(buffer)
    if plan.scaling != 1.0:
        # In float32, so that a bfloat16 B is rounded once.
        b = b.float() * plan.scaling
    return plan.a.view(buffer).to(dtype), b.to(dtype)
