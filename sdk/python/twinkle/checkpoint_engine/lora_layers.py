"""Names, ranks and scaling factors of an adapter's layers.

Canonical tensor names are those that PEFT saves: `base_model.model.<path>.lora_A.weight`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

from twinkle.data_format import LoraConfig

PREFIX = 'base_model.model.'
"""Prefix that PEFT adds to a path of the base model."""
_TENSOR = re.compile(r'(?P<path>.+)\.lora_(?P<part>[AB])(\.(?P<adapter>\w+))?\.weight')
"""Name of a LoRA matrix, in any of the forms that `canonical_names` supports."""
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


def layer_ranks(shapes: Shapes) -> dict[str, int]:
    """Return the rank of each layer, by path, in the order of the tensors.

    Args:
        shapes: Shape of each tensor, by canonical name.

    Raises:
        ValueError: a layer lacks lora_A or lora_B, or their shapes do not match.
    """
    ranks: dict[str, int] = {}
    paths = dict.fromkeys(layer_path(name) for name in shapes)
    for path in paths:
        a, b = (shapes.get(f'{PREFIX}{path}.lora_{part}.weight') for part in 'AB')
        if a is None or b is None:
            raise ValueError(f'layer {path} has no {"lora_B" if a else "lora_A"}')
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
            raise ValueError(f'the shapes of lora_A {list(a)} and lora_B {list(b)} of layer {path} do not match')
        ranks[path] = a[0]
    return ranks


def layer_path(name: str) -> str:
    """Return the path of a tensor's layer in the base model, from the tensor's canonical name."""
    return name.removeprefix(PREFIX).rpartition('.lora_')[0]


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
