"""Layers that a LoRA configuration selects, with their rank and scaling."""

from collections.abc import Mapping, Sequence

from twinkle.checkpoint_engine import is_named, scaling_at, value_at
from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import ALL_ATTENTION, ALL_LINEAR, ALL_MLP, OUTPUT_HEAD
from twinkle.nn.errors import UnknownTargetModules

_ATTENTION_MARKS = ('attn', 'attention')
"""Substrings of the path of attention's linear layers in every architecture of transformers."""
Layers = Mapping[str, tuple[int, int]]
"""Module path to `(in_features, out_features)`, in the model's order."""


class TargetLayers(dict[str, tuple[int, int]]):
    """`Layers` whose last entry is the output head.

    Args:
        layers: every linear layer except the head.
        head: module path of the head.
        shape: `(in_features, out_features)` of the head.
    """

    def __init__(self, layers: Layers, *, head: str, shape: tuple[int, int]) -> None:
        super().__init__({**layers, head: shape})
        self.head = head


def select_layers(layers: Layers, config: LoraConfig) -> list[str]:
    """Return the paths that the configuration targets, in the model's order.

    Raises:
        UnknownTargetModules: a name or a pattern's key matches no targeted layer.
    """
    names = [config.target_modules] if isinstance(config.target_modules, str) else list(config.target_modules)
    groups = _groups(layers)
    unknown = [name for name in names if not groups.get(name)]
    _check_known(unknown, list(layers))
    chosen = {path for name in names for path in groups.get(name, ())}
    selected = [path for path in layers if path in chosen or any(is_named(path, name) for name in unknown)]
    _check_known([*config.rank_pattern, *config.alpha_pattern], selected)
    return selected


def _groups(layers: Layers) -> dict[str, list[str]]:
    """Return the paths of each group in `TARGET_GROUPS`."""
    head = layers.head if isinstance(layers, TargetLayers) else ''
    body = [path for path in layers if path != head]
    attention = [path for path in body if is_attention_layer(path)]
    return {
        ALL_LINEAR: body,
        ALL_ATTENTION: attention,
        ALL_MLP: [path for path in body if path not in attention],
        OUTPUT_HEAD: [head] if head else [],
    }


def is_attention_layer(path: str) -> bool:
    """Return whether the path of a linear layer belongs to attention."""
    return any(mark in path for mark in _ATTENTION_MARKS)


def rank_of(path: str, config: LoraConfig) -> int:
    """Return the LoRA rank of the layer at `path`."""
    return value_at(config.rank_pattern, path, config.r)


def scaling_of(path: str, config: LoraConfig) -> float:
    """Return the scaling factor of the update of the layer at `path`."""
    return scaling_at(path, config)


def matches_any(path: str, names: Sequence[str]) -> bool:
    """Return whether a name equals one or more consecutive dotted parts of the path."""
    return any(f'.{name}.' in f'.{path}.' for name in names)


def _check_known(names: list[str] | tuple[str, ...], paths: list[str]) -> None:
    unknown = sorted(name for name in names if not any(is_named(path, name) for path in paths))
    if unknown:
        raise UnknownTargetModules(unknown, sorted({path.rpartition('.')[2] for path in paths}))
