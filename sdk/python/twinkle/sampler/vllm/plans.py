"""Which tensor of an adapter goes where in a model, and whether it fits. Runs in vLLM's workers.

A *plan* is made once for a layout, since every version of an adapter has the same one.
"""

import json
import mmap
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.lora.utils import parse_fine_tuned_lora_name

from twinkle.checkpoint_engine import scaling_at
from twinkle.data_format import LoraConfig

_DTYPES = {
    'float32': torch.float32,
    'bfloat16': torch.bfloat16,
    'float16': torch.float16,
    'float64': torch.float64,
}
_PLANS_KEPT = 64


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor; it aliases `buffer`, which is uint8 [bytes]."""
        end = self.offset + self.dtype.itemsize * prod(self.shape)
        return buffer[self.offset : end].view(self.dtype).view(self.shape)

    def view_typed(self, elements: Tensor) -> Tensor:
        """Return a matrix as `view` does, in one step, from the file seen as elements of its dtype."""
        return elements.as_strided(self.shape, (self.shape[1], 1), self.offset // self.dtype.itemsize)

    @property
    def is_aligned(self) -> bool:
        """Whether `view_typed` can be used."""
        return len(self.shape) == 2 and self.offset % self.dtype.itemsize == 0


@dataclass(frozen=True)
class LayerPlan:
    """The two factors of one layer and the factor of its update."""

    a: Place
    b: Place
    scaling: float


@dataclass(frozen=True)
class Plan:
    """Where everything goes: by vLLM's modules, for packed ones one entry for each part."""

    size_bytes: int
    rank: int
    modules: Mapping[str, tuple[LayerPlan | None, ...]]


class Misfit(ValueError):
    """The weights do not fit this model; says which and why."""


class PlanBook:
    """Plans by layout; the last ones used are kept."""

    def __init__(self, manager: Any) -> None:
        """Plan for the modules of vLLM's adapter manager."""
        self.manager = manager
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()

    def plan(self, layout: bytes) -> Plan:
        """Return the plan for a layout.

        Raises:
            Misfit: it cannot be used on this model.
        """
        if layout in self._plans:
            self._plans.move_to_end(layout)
            return self._plans[layout]
        plan = make_plan(self.manager, layout)
        self._plans[layout] = plan
        while len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)
        return plan


def map_file(path: str, size_bytes: int) -> Tensor:
    """Return a file's bytes as uint8 [bytes], copied nowhere; they stay until the tensor is gone.

    Raises:
        Misfit: the file is shorter than it has to be.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size < size_bytes:
            raise Misfit(f'the file of weights ends before byte {size_bytes}')
        # Private and writable, since torch knows no read-only tensors; nobody writes, so no page is copied.
        area = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(area, dtype=torch.uint8)


def read_layout(layout: bytes) -> tuple[dict[str, Place], LoraConfig | None, int]:
    """Return each tensor's place, the adapter's configuration and the bytes of the file.

    Raises:
        Misfit: a dtype that no weights have.
    """
    value = json.loads(layout)
    places: dict[str, Place] = {}
    for name, dtype, shape, offset in value['tensors']:
        if dtype not in _DTYPES:
            raise Misfit(f'{name} is {dtype}; weights are one of {sorted(_DTYPES)}')
        places[name] = Place(_DTYPES[dtype], tuple(shape), offset)
    config = value['config']
    return places, None if config is None else LoraConfig.of(config), value['size_bytes']


def make_plan(manager: Any, layout: bytes) -> Plan:
    """Decide where each tensor of a layout goes.

    Raises:
        Misfit: a tensor belongs to no layer that takes an adapter, or does not fit it.
    """
    places, config, size_bytes = read_layout(layout)
    if config is None:
        raise Misfit('the weights have no LoRA configuration')
    layers = _layer_plans(manager, places, config)
    modules: dict[str, tuple[LayerPlan | None, ...]] = {}
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        plans = tuple(layers.pop(part, None) for part in parts)
        if any(plans):
            _check_shapes(name, parts, plans, _widths(module, len(parts)))
            modules[name] = plans
    if layers:
        unknown = ', '.join(sorted(layers)[:3])
        raise Misfit(f'{len(layers)} layers take no adapter here, such as {unknown}')
    rank = max(plan.a.shape[0] for plans in modules.values() for plan in plans if plan)
    if rank > manager.lora_config.max_lora_rank:
        raise Misfit(f'its rank {rank} is above max_lora_rank, {manager.lora_config.max_lora_rank}')
    return Plan(size_bytes, rank, modules)


def _layer_plans(manager: Any, places: Mapping[str, Place], config: LoraConfig) -> dict[str, LayerPlan]:
    mapper = getattr(manager.model, 'hf_to_vllm_mapper', None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    halves: dict[str, dict[bool, Place]] = {}
    paths: dict[str, str] = {}
    for name, place in places.items():
        try:
            module, is_a = parse_fine_tuned_lora_name(name, mapper)
            path, _ = parse_fine_tuned_lora_name(name)
        except ValueError as error:
            raise Misfit(f'{name} is no LoRA matrix of a linear layer') from error
        pair = halves.setdefault(module, {})
        if is_a in pair:
            raise Misfit(f'{name} is another name for what {module} has already')
        pair[is_a] = place
        paths[module] = path
    for module, pair in halves.items():
        if len(pair) != 2:
            raise Misfit(f'{module} lacks lora_{"B" if True in pair else "A"}')
    return {
        module: LayerPlan(pair[True], pair[False], scaling_at(paths[module], config)) for module, pair in halves.items()
    }


def _check_shapes(
    name: str, parts: list[str], plans: tuple[LayerPlan | None, ...], widths: tuple[int, tuple[int, ...]]
) -> None:
    inputs, outputs = widths
    for part, plan, output in zip(parts, plans, outputs, strict=True):
        if plan is None:
            continue
        a, b = plan.a.shape, plan.b.shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
            raise Misfit(f'lora_A {list(a)} and lora_B {list(b)} of {part} do not fit together')
        if a[1] != inputs or b[0] != output:
            raise Misfit(f'{part} maps {inputs} to {output}, its adapter {a[1]} to {b[0]} ({name})')


def _widths(module: Any, part_count: int) -> tuple[int, tuple[int, ...]]:
    """Return inputs and the outputs of each part of a layer, whole, however many ranks share it.

    Raises:
        Misfit: a kind of layer that is not built from memory yet, such as experts.
    """
    base = module.base_layer
    if not hasattr(base, 'input_size') or not hasattr(base, 'output_size'):
        raise Misfit(f'adapters of {type(base).__name__} are not supported yet')
    if part_count == 1:
        return base.input_size, (base.output_size,)
    if hasattr(base, 'total_num_kv_heads'):
        key_value = base.total_num_kv_heads * base.head_size
        return base.input_size, (base.total_num_heads * base.head_size, key_value, key_value)
    return base.input_size, tuple(base.output_sizes)
