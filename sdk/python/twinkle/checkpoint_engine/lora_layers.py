"""Which layer an adapter's tensor belongs to, under which names, and how that layer's update is scaled.

Canonical names are peft's, as it saves them: `base_model.model.<path>.lora_A.weight`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

from twinkle.data_format import LoraConfig

PREFIX = 'base_model.model.'
"""What peft puts before a path of the base model."""
_TENSOR = re.compile(r'(?P<path>.+)\.lora_(?P<part>[AB])(\.(?P<adapter>\w+))?\.weight')
_Value = TypeVar('_Value')

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor, by name."""


def canonical_names(names: list[str]) -> dict[str, str]:
    """Return each tensor's canonical name by the name it has.

    Understood are peft's own names, those of a model's state dict, which hold the adapter's name
    (`lora_A.default.weight`), and names without the prefix, as some tools write.

    Raises:
        ValueError: a tensor is no LoRA matrix, or two adapters are mixed.
    """
    found = {name: _TENSOR.fullmatch(name) for name in names}
    for name, match in found.items():
        if match is None:
            raise ValueError(f'tensor {name!r} is not supported; only lora_A and lora_B of linear layers are')
    matches = {name: match for name, match in found.items() if match is not None}
    adapters = sorted({match['adapter'] or '' for match in matches.values()})
    if len(adapters) > 1:
        raise ValueError(f'it holds several adapters, {adapters}; save one at a time')
    return {
        name: f'{PREFIX}{match["path"].removeprefix(PREFIX)}.lora_{match["part"]}.weight'
        for name, match in matches.items()
    }


def layer_ranks(shapes: Shapes) -> dict[str, int]:
    """Return the rank of each layer by its path, in the order of the tensors.

    Args:
        shapes: by canonical name.

    Raises:
        ValueError: a layer lacks a factor, or its factors do not fit together.
    """
    ranks: dict[str, int] = {}
    paths = dict.fromkeys(layer_path(name) for name in shapes)
    for path in paths:
        a, b = (shapes.get(f'{PREFIX}{path}.lora_{part}.weight') for part in 'AB')
        if a is None or b is None:
            raise ValueError(f'layer {path} lacks {"lora_A" if a is None else "lora_B"}')
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
            raise ValueError(f'lora_A {list(a)} and lora_B {list(b)} of layer {path} do not fit together')
        ranks[path] = a[0]
    return ranks


def layer_path(name: str) -> str:
    """Return the path in the base model of a tensor's layer, from its canonical name."""
    return name.removeprefix(PREFIX).rpartition('.lora_')[0]


def is_named(path: str, name: str) -> bool:
    """Whether `name` is the path, or its end from a dot on."""
    return path == name or path.endswith(f'.{name}')


def endings(path: str) -> Iterator[str]:
    """Yield every name that `is_named` takes for the path: itself, and its ends from a dot on."""
    yield path
    for place, character in enumerate(path, 1):
        if character == '.':
            yield path[place:]


def value_at(pattern: Mapping[str, _Value], path: str, default: _Value) -> _Value:
    """Return what the first name of `pattern` that fits the path says."""
    fitting = {name for name in endings(path) if name in pattern}
    if len(fitting) > 1:
        return next(value for name, value in pattern.items() if name in fitting)
    return pattern[fitting.pop()] if fitting else default


def scaling_at(path: str, config: LoraConfig) -> float:
    """Return the factor of a layer's update `B A x`."""
    rank = value_at(config.rank_pattern, path, config.r)
    alpha = value_at(config.alpha_pattern, path, config.lora_alpha)
    return alpha / rank**0.5 if config.use_rslora else alpha / rank
