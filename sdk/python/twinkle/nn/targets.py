"""Layers that a LoRA configuration selects, with their rank and scaling."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from twinkle.checkpoint_engine import is_named, scaling_at, value_at
from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import ALL_ATTENTION, ALL_EXPERTS, ALL_LINEAR, ALL_MLP, OUTPUT_HEAD, is_expert_weight
from twinkle.nn.errors import ExpertDropout, UnknownTargetModules

_ATTENTION_MARKS = ('attn', 'attention')
"""Substrings in the paths of attention layers. In transformers, each such path contains at least one."""
Layers = Mapping[str, tuple[int, int]]
"""Module path to `(in_features, out_features)`, in the model's order."""


class TargetLayers(dict[str, tuple[int, int]]):
    """`Layers` with the stacked expert weights after the linear layers, and the output head as the last entry.

    Args:
        layers: every linear layer except the head.
        head: module path of the head.
        shape: `(in_features, out_features)` of the head.
        experts: path to `(experts, in_features, out_features)` of each stacked weight.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        head: str,
        shape: tuple[int, int],
        experts: Mapping[str, tuple[int, int, int]] = MappingProxyType({}),
    ) -> None:
        stacked = {path: (inputs, outputs) for path, (_, inputs, outputs) in experts.items()}
        super().__init__({**layers, **stacked, head: shape})
        self.head = head
        self.expert_counts = {path: count for path, (count, *_) in experts.items()}
        """Number of experts of each stacked weight, by path."""


def select_layers(layers: Layers, config: LoraConfig) -> list[str]:
    """Return the paths that the configuration targets, in the model's order.

    A name matches the stacked expert weights only if it includes their module, such as `experts.down_proj`.

    Raises:
        UnknownTargetModules: a name matches no layer, or the key of a pattern matches no targeted layer.
        ExpertDropout: the configuration has dropout and targets experts.
    """
    names = [config.target_modules] if isinstance(config.target_modules, str) else list(config.target_modules)
    groups = _groups(layers)
    unknown = [name for name in names if not groups.get(name)]
    counts = expert_counts_of(layers)
    for name in unknown:
        groups[name] = [path for path in layers if _selects(name, path, counts)]
    _check_known([name for name in unknown if not groups[name]], layers)
    chosen = {path for name in names for path in groups[name]}
    selected = [path for path in layers if path in chosen]
    patterns = (*config.rank_pattern, *config.alpha_pattern)
    _check_known([name for name in patterns if not any(is_named(path, name) for path in selected)], selected)
    for path in selected:
        if config.lora_dropout and path in counts:
            raise ExpertDropout(path)
    return selected


def expert_counts_of(layers: Layers) -> Mapping[str, int]:
    """Return the number of experts of each stacked weight, by path."""
    return layers.expert_counts if isinstance(layers, TargetLayers) else {}


def trained_shape(layers: Layers, path: str) -> tuple[int, int]:
    """Return the input and output sizes of the layer at `path`; for stacked weights, their sums over all experts."""
    inputs, outputs = layers[path]
    count = expert_counts_of(layers).get(path, 1)
    return inputs * count, outputs * count


def _selects(name: str, path: str, expert_counts: Mapping[str, int]) -> bool:
    return is_named(path, name) and (path not in expert_counts or '.' in name)


def _groups(layers: Layers) -> dict[str, list[str]]:
    """Return the paths of each group in `TARGET_GROUPS`."""
    head = layers.head if isinstance(layers, TargetLayers) else ''
    experts = expert_counts_of(layers)
    body = [path for path in layers if path != head and path not in experts]
    attention = [path for path in body if is_attention_layer(path)]
    return {
        ALL_LINEAR: body,
        ALL_ATTENTION: attention,
        ALL_MLP: [path for path in body if path not in attention],
        ALL_EXPERTS: list(experts),
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


def _check_known(unknown: Sequence[str], paths: Iterable[str]) -> None:
    """Refuse names that match none of the paths."""
    if unknown:
        raise UnknownTargetModules(sorted(unknown), sorted({_shortest_name(path) for path in paths}))


def _shortest_name(path: str) -> str:
    """Return the shortest name that selects a layer."""
    return '.'.join(path.split('.')[-2 if is_expert_weight(path) else -1 :])
