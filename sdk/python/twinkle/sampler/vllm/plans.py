"""Assignment of an adapter's tensors to a model's layers, with checks of shapes. Runs in vLLM's workers.

A *plan* is this assignment. It is computed once per layout and cached, because all versions of an adapter have the same
layout: the names, dtypes, shapes and offsets of the tensors, and the LoRA configuration.
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
from twinkle.checkpoint_engine.lora_layers import is_expert_tensor
from twinkle.data_format import LoraConfig

_DTYPES = {
    'float32': torch.float32,
    'bfloat16': torch.bfloat16,
    'float16': torch.float16,
    'float64': torch.float64,
}
_CACHED_PLANS = 64


@dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor in a file of weights."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Position of the first byte in the file."""

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor as a view of `buffer`, which is uint8 [bytes]; a copy if its bytes are not aligned."""
        part = buffer[self.offset : self.offset + self.dtype.itemsize * prod(self.shape)]
        if self.offset % self.dtype.itemsize:
            # Torch cannot view bytes that are not aligned, for example after a tensor of a smaller dtype.
            part = part.clone()
        return part.view(self.dtype).view(self.shape)

    def view_typed(self, elements: Tensor) -> Tensor:
        """Return a matrix like `view`, in a single operation; `elements` is the file as elements of the dtype."""
        return elements.as_strided(self.shape, (self.shape[1], 1), self.offset // self.dtype.itemsize)

    @property
    def is_aligned(self) -> bool:
        """Whether `view_typed` can be used."""
        return len(self.shape) == 2 and self.offset % self.dtype.itemsize == 0


@dataclass(frozen=True)
class LayerPlan:
    """The two factors of one layer and its scaling factor."""

    a: TensorLocation
    b: TensorLocation
    scaling: float


@dataclass(frozen=True)
class Plan:
    """The layers of an adapter, by module of vLLM. A packed module has one entry per part, None without LoRA."""

    size_bytes: int
    rank: int
    """Largest rank of a layer."""
    modules: Mapping[str, tuple[LayerPlan | None, ...]]


class Misfit(ValueError):
    """The weights do not fit this model. The message has the reason and, if known, the tensor or layer."""


class PlanCache:
    """The most recently used plans, by layout, for the modules of vLLM's adapter manager."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()

    def plan(self, layout: bytes) -> Plan:
        """Return the plan of a layout.

        Raises:
            Misfit: the adapter does not fit this model.
        """
        if layout in self._plans:
            self._plans.move_to_end(layout)
            return self._plans[layout]
        plan = make_plan(self.manager, layout)
        self._plans[layout] = plan
        while len(self._plans) > _CACHED_PLANS:
            self._plans.popitem(last=False)
        return plan


def map_file(path: str, size_bytes: int) -> Tensor:
    """Map a file into memory and return it as uint8 [bytes]. The mapping exists as long as the tensor.

    Raises:
        Misfit: the file is too short.
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size < size_bytes:
            raise Misfit(f'the weights file has fewer than {size_bytes} bytes')
        # The mapping is writable because torch has no read-only tensors. It is private and never written to, so no page
        # is copied.
        area = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(area, dtype=torch.uint8)


def read_layout(layout: bytes) -> tuple[dict[str, TensorLocation], LoraConfig | None, int]:
    """Parse a layout; return the location of each tensor, the adapter's configuration and the size of the file.

    Raises:
        Misfit: a tensor has an unsupported dtype.
    """
    value = json.loads(layout)
    locations: dict[str, TensorLocation] = {}
    for name, dtype, shape, offset in value['tensors']:
        if dtype not in _DTYPES:
            raise Misfit(f'{name} has the dtype {dtype}; use one of {sorted(_DTYPES)}')
        locations[name] = TensorLocation(_DTYPES[dtype], tuple(shape), offset)
    config = value['config']
    return locations, None if config is None else LoraConfig.of(config), value['size_bytes']


def make_plan(manager: Any, layout: bytes) -> Plan:
    """Assign the tensors of a layout to the model's layers.

    Raises:
        Misfit: the layout has no tensors or no LoRA configuration; or a tensor belongs to no layer that supports LoRA,
            lacks its counterpart (A or B), is a duplicate, has the wrong dtype or shape, or exceeds the maximum rank.
    """
    locations, config, size_bytes = read_layout(layout)
    if config is None:
        raise Misfit('the weights have no LoRA configuration')
    layers = _layer_plans(manager, locations, config)
    modules: dict[str, tuple[LayerPlan | None, ...]] = {}
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        plans = tuple(layers.pop(part, None) for part in parts)
        if any(plans):
            _check_shapes(name, parts, plans, _widths(module, len(parts)))
            modules[name] = plans
    if layers:
        unknown = ', '.join(sorted(layers)[:3])
        raise Misfit(f'{len(layers)} layers do not support LoRA here, such as {unknown}')
    if not modules:
        raise Misfit('the weights contain no LoRA matrices')
    rank = max(plan.a.shape[0] for plans in modules.values() for plan in plans if plan)
    if rank > manager.lora_config.max_lora_rank:
        raise Misfit(
            f'rank {rank} is above max_lora_rank {manager.lora_config.max_lora_rank}; raise max_lora_rank, or use a '
            'lower rank'
        )
    return Plan(size_bytes, rank, modules)


def _layer_plans(manager: Any, locations: Mapping[str, TensorLocation], config: LoraConfig) -> dict[str, LayerPlan]:
    mapper = getattr(manager.model, 'hf_to_vllm_mapper', None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    pairs: dict[str, dict[bool, TensorLocation]] = {}
    paths: dict[str, str] = {}
    for name, location in locations.items():
        try:
            module, is_a = parse_fine_tuned_lora_name(name, mapper)
            path, _ = parse_fine_tuned_lora_name(name)
        except ValueError as error:
            raise Misfit(f'{name} is not a LoRA matrix of a linear layer') from error
        if is_expert_tensor(path):
            raise Misfit(f'{path} has adapters of expert layers, which only the torch engine supports')
        pair = pairs.setdefault(module, {})
        if is_a in pair:
            raise Misfit(f'{name} duplicates a matrix of {module}')
        pair[is_a] = location
        paths[module] = path
    for module, pair in pairs.items():
        if len(pair) != 2:
            raise Misfit(f'{module} has no lora_{"B" if True in pair else "A"}')
    return {
        module: LayerPlan(pair[True], pair[False], scaling_at(paths[module], config)) for module, pair in pairs.items()
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
            raise Misfit(f'the shapes of lora_A {list(a)} and lora_B {list(b)} of {part} do not match')
        if a[1] != inputs or b[0] != output:
            raise Misfit(
                f'{part} maps {inputs} to {output} features, but its adapter maps {a[1]} to {b[0]} '
                f'(part of module {name})'
            )


def _widths(module: Any, part_count: int) -> tuple[int, tuple[int, ...]]:
    """Return the input width of a layer and the output width of each part, before the split over tensor-parallel ranks.

    Raises:
        Misfit: the type of layer is not supported yet, such as experts.
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
