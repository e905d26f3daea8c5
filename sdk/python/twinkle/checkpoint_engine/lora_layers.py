"""Names, ranks and scaling factors of an adapter's layers.

Canonical tensor names are PEFT's names in files: `base_model.model.<path>.lora_A.weight`. The matrices of experts are
stacked: A has shape `[experts * rank, in]`, and column `k * experts + e` of B is column k of expert e.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import ALL_EXPERTS, EXPERT_PARAMETERS, EXPERTS, is_expert_weight

PREFIX = 'base_model.model.'
"""Prefix that PEFT adds to a path of the base model."""
_TENSOR = re.compile(r'(?P<path>.+)\.lora_(?P<part>[AB])(\.(?P<adapter>\w+))?\.weight')
"""Name of a LoRA matrix, in any of the forms that `canonical_names` supports."""
NESTED = 'base_layer'
"""Component that PEFT adds to the path of a tensor for each further wrapper of the same module."""
_Value = TypeVar('_Value')

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor, by name."""


def canonical_names(names: list[str]) -> dict[str, str]:
    """Return the canonical name of each tensor, by its given name.

    Three forms are supported: the names that PEFT saves, the names in a model's state dict, which contain the adapter's
    name (`lora_A.default.weight`), and names without the prefix, which some tools write.

    Raises:
        ValueError: a tensor is not a LoRA matrix, or there are several adapters.
    """
    found = {name: _TENSOR.fullmatch(name) for name in names}
    for name, match in found.items():
        if match is None:
            raise ValueError(f'tensor {name!r} is not supported; only lora_A and lora_B of linear layers are supported')
    matches = {name: match for name, match in found.items() if match is not None}
    adapters = sorted({match['adapter'] or '' for match in matches.values()})
    if len(adapters) > 1:
        raise ValueError(f'the file contains several adapters {adapters}; save each adapter separately')
    return {
        name: f'{PREFIX}{match["path"].removeprefix(PREFIX)}.lora_{match["part"]}.weight'
        for name, match in matches.items()
    }


@dataclass(frozen=True)
class AdapterLayer:
    """An adapted weight of the base model."""

    path: str
    """Path of the linear layer, or of the stacked expert weights."""
    tensor_path: str
    """Path in the names of the tensors; it differs from `path` for experts only."""
    rank: int
    shape: tuple[int, int]
    """`(out, in)` of the linear layer or of one expert."""
    expert_count: int | None
    """Number of experts, or None for a linear layer."""

    def tensor_name(self, part: str) -> str:
        """Return the canonical name of part 'A' or 'B'."""
        return f'{PREFIX}{self.tensor_path}.lora_{part}.weight'


def adapter_layers(shapes: Shapes, config: LoraConfig) -> list[AdapterLayer]:
    """Return the adapted weights, in the order of the tensors.

    Args:
        shapes: shape of each tensor, by canonical name.
        config: configuration of the adapter.

    Raises:
        ValueError: a layer lacks lora_A or lora_B, their shapes do not match, or the row count of the lora_A of experts
            is not a multiple of the rank.
    """
    tensor_paths = list(dict.fromkeys(layer_path(name) for name in shapes))
    paths = _weight_paths(tensor_paths, config)
    return [_adapter_layer(shapes, tensor_path, paths.get(tensor_path), config) for tensor_path in tensor_paths]


def tensor_paths_of(paths: Sequence[str]) -> dict[str, str]:
    """Map the path of each adapted weight to the path in the names of its tensors.

    PEFT wraps a module of experts once for each of its stacked weights. The wrapper of the last weight has the path of
    the module. Each other wrapper is the `base_layer` of the wrapper of the next weight.
    """
    found: dict[str, str] = {}
    nested: dict[str, str] = {}
    for path in reversed(paths):
        module = path.rpartition('.')[0]
        found[path] = nested.get(module, module) if is_expert_weight(path) else path
        nested[module] = f'{found[path]}.{NESTED}'
    return {path: found[path] for path in paths}


def _weight_paths(tensor_paths: Sequence[str], config: LoraConfig) -> dict[str, str]:
    """Map the path in the names of the tensors to the path of each stacked weight."""
    modules = dict.fromkeys(path.replace(f'.{NESTED}', '') for path in tensor_paths if is_expert_tensor(path))
    found: dict[str, str] = {}
    for module in modules:
        weights = [path for name in EXPERT_PARAMETERS if _is_target(path := f'{module}.{name}', config)]
        found |= {tensor_path: path for path, tensor_path in tensor_paths_of(weights).items()}
    return found


def _is_target(path: str, config: LoraConfig) -> bool:
    targets = config.target_modules
    names = (targets,) if isinstance(targets, str) else targets
    return any(name == ALL_EXPERTS or (is_expert_weight(name) and is_named(path, name)) for name in names)


def _adapter_layer(shapes: Shapes, tensor_path: str, weight_path: str | None, config: LoraConfig) -> AdapterLayer:
    a, b = (shapes.get(f'{PREFIX}{tensor_path}.lora_{part}.weight') for part in 'AB')
    if a is None or b is None:
        raise ValueError(f'layer {tensor_path} has no {"lora_B" if a else "lora_A"}')
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
        raise ValueError(f'the shapes of lora_A {list(a)} and lora_B {list(b)} of layer {tensor_path} do not match')
    if weight_path is None:
        return AdapterLayer(tensor_path, tensor_path, a[0], (b[0], a[1]), None)
    rank = value_at(config.rank_pattern, weight_path, config.r)
    if a[0] % rank:
        raise ValueError(f'lora_A of the experts {weight_path} has {a[0]} rows, which is not a multiple of rank {rank}')
    return AdapterLayer(weight_path, tensor_path, rank, (b[0], a[1]), a[0] // rank)


def layer_path(name: str) -> str:
    """Return the path in the canonical name of a tensor."""
    return name.removeprefix(PREFIX).rpartition('.lora_')[0]


def is_expert_tensor(path: str) -> bool:
    """Return whether a path in the name of a tensor belongs to the stacked expert weights."""
    return path.replace(f'.{NESTED}', '').rpartition('.')[2] == EXPERTS


def is_named(path: str, name: str) -> bool:
    """Return whether `name` equals the path or its last components."""
    return path == name or path.endswith(f'.{name}')


def endings(path: str) -> Iterator[str]:
    """Yield all names for which `is_named` is true: the path, and its suffixes after each dot."""
    yield path
    for position, character in enumerate(path, 1):
        if character == '.':
            yield path[position:]


def value_at(pattern: Mapping[str, _Value], path: str, default: _Value) -> _Value:
    """Return the value of the first name in `pattern` that matches the path, or `default`."""
    matching = {name for name in endings(path) if name in pattern}
    if len(matching) > 1:
        return next(value for name, value in pattern.items() if name in matching)
    return pattern[matching.pop()] if matching else default


def scaling_at(path: str, config: LoraConfig) -> float:
    """Return the scaling factor of a layer's update `B A x`."""
    rank = value_at(config.rank_pattern, path, config.r)
    alpha = value_at(config.alpha_pattern, path, config.lora_alpha)
    return alpha / rank**0.5 if config.use_rslora else alpha / rank
