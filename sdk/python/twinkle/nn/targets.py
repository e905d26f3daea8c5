"""Which layers a LoRA configuration means, and with which rank and alpha."""

from collections.abc import Mapping, Sequence

from twinkle.checkpoint_engine import is_named, scaling_at, value_at
from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import ALL_LINEAR
from twinkle.nn.errors import UnknownTargetModules

Layers = Mapping[str, tuple[int, int]]
"""Module path to `(in_features, out_features)`, in the model's order."""


def select_layers(layers: Layers, config: LoraConfig) -> list[str]:
    """Return the paths that the configuration targets, in the model's order.

    Raises:
        UnknownTargetModules: a name, or a pattern's key, matches no targeted layer.
    """
    if config.target_modules == ALL_LINEAR:
        selected = list(layers)
    else:
        names = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
        _check_known(names, list(layers))
        selected = [path for path in layers if any(is_named(path, name) for name in names)]
    _check_known([*config.rank_pattern, *config.alpha_pattern], selected)
    return selected


def rank_of(path: str, config: LoraConfig) -> int:
    """Return the LoRA rank of a layer."""
    return value_at(config.rank_pattern, path, config.r)


def scaling_of(path: str, config: LoraConfig) -> float:
    """Return the factor of a layer's update."""
    return scaling_at(path, config)


def matches_any(path: str, names: Sequence[str]) -> bool:
    """Return whether some name is the path or the end of it, or of the path of a module it is in."""
    return any(f'.{name}.' in f'.{path}.' for name in names)


def _check_known(names: list[str] | tuple[str, ...], paths: list[str]) -> None:
    unknown = sorted(name for name in names if not any(is_named(path, name) for path in paths))
    if unknown:
        raise UnknownTargetModules(unknown, sorted({path.rpartition('.')[2] for path in paths}))
