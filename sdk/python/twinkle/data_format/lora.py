"""The LoRA configuration of an adapter, without torch.

Fields have PEFT's names, so that functions also accept a `peft.LoraConfig`: `LoraConfig.of` reads the fields that both
classes have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

_Value = TypeVar('_Value')
ALL_LINEAR = 'all-linear'
"""Every linear layer of the model except its output head."""
ALL_ATTENTION = 'all-attention'
"""The linear layers of attention, independent of their names in an architecture."""
ALL_MLP = 'all-mlp'
"""Every linear layer that belongs neither to attention nor to the output head."""
ALL_EXPERTS = 'all-experts'
"""The stacked expert weights of every mixture, which `all-linear` and `all-mlp` do not include."""
OUTPUT_HEAD = 'output-head'
"""The output head. Embeddings that are tied to it do not change."""
_METHOD = 'LORA'
"""The supported `peft_type`."""
TARGET_GROUPS = (ALL_LINEAR, ALL_ATTENTION, ALL_MLP, ALL_EXPERTS, OUTPUT_HEAD)
"""Names in `target_modules` that select groups of layers. They can be combined with names of layers."""
EXPERTS = 'experts'
"""Name of the module with the stacked weights of all experts of a layer."""
EXPERT_PARAMETERS = ('gate_up_proj', 'down_proj')
"""Stacked weights that accept adapters, in the order of the module."""

PEFT_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {
    'bias': (None, 'none'),
    'use_dora': (None, False),
    'modules_to_save': (None, []),
    'fan_in_fan_out': (None, False),
    'layer_replication': (None, []),
    'trainable_token_indices': (None, [], {}),
    'lora_bias': (None, False),
    'use_qalora': (None, False),
    'use_bdlora': (None, False),
    'alora_invocation_tokens': (None, []),
    'arrow_config': (None, {}),
    'kasa_config': (None, {}),
    'velora_config': (None, {}),
    'monteclora_config': (None, {}),
    'megatron_config': (None, {}),
}
"""Fields of a `peft.LoraConfig` that change the computation, with the values that are supported."""
_REQUIRED_AT_CREATION: Mapping[str, tuple[Any, ...]] = {
    **PEFT_REQUIRED_VALUES,
    'init_lora_weights': (None, True),
    'exclude_modules': (None, [], set[str]()),
    'layers_to_transform': (None, []),
    'layers_pattern': (None, []),
}
"""Fields that are checked when an adapter is created, including fields that affect only its creation."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adaptation of linear layers (Hu et al. 2021, arXiv:2106.09685, section 4.1).

    The adapted layer computes `W x + scaling * B A x`, where `A` has shape `[r, in]` and `B` has shape `[out, r]`.
    """

    r: int = 8
    """Rank of the adaptation, at least 1."""
    lora_alpha: float = 16.0
    """Numerator of the scaling: `scaling = lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora`."""
    lora_dropout: float = 0.0
    """Probability in [0, 1) of dropping an input element of `A` during training."""
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    """One or more names, each from `TARGET_GROUPS` or matched against the end of each module's path.

    Stacked expert weights are named with their module, such as `experts.down_proj`. PEFT has a separate field
    `target_parameters` for them, which `of` adds to this field.
    """
    use_rslora: bool = False
    """Whether to use rank-stabilized scaling (Kalajdzievski 2023, arXiv:2312.03732)."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    """Ranks other than `r`, by the end of a module's path. The first match applies, as in PEFT."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    """Alphas other than `lora_alpha`, by the end of a module's path. The first match applies."""
    seed: int | None = None
    """Seed of `A`'s initial values and of dropout. If None, the trainer chooses a seed and reports it."""

    def __post_init__(self) -> None:
        """Validate the values.

        Raises:
            ValueError: a value is out of range. The message names the field.
        """
        if self.r < 1:
            raise ValueError(f'r must be at least 1, got {self.r}')
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ValueError(f'lora_dropout must be in [0, 1), got {self.lora_dropout}')
        if not self.lora_alpha > 0.0:
            raise ValueError(f'lora_alpha must be positive, got {self.lora_alpha}')
        if not self.target_modules:
            raise ValueError("target_modules must not be empty; name modules or use 'all-linear'")

    @classmethod
    def of(cls, config: Any) -> 'LoraConfig':
        """Return `config` as a `LoraConfig`.

        Args:
            config: a `LoraConfig`, a mapping with its fields, or a `peft.LoraConfig`.

        Raises:
            TypeError: a mapping has an unknown key, or `config` has no rank `r`.
            ValueError: a value is out of range, a `peft.LoraConfig` has an unsupported setting, or `config` belongs to
                a different PEFT method.
        """
        if isinstance(config, LoraConfig):
            return config
        _check_method(config)
        if isinstance(config, Mapping):
            values = dict(cast(Mapping[str, Any], config))
        else:
            _check_supported(config)
            known = (*(item.name for item in fields(cls)), 'target_parameters')
            values = {name: getattr(config, name) for name in known if hasattr(config, name)}
        values = {name: value for name, value in values.items() if value is not None}
        parameters = expert_names(values.pop('target_parameters', ()))
        # PEFT adapts no module if only parameters are given.
        default = () if parameters else ALL_LINEAR
        targets = values.get('target_modules', default)
        if parameters and isinstance(targets, str):
            targets = (targets,)
        if not isinstance(targets, str):
            values['target_modules'] = tuple(sorted({*targets, *parameters}))
        return cls(**values)


def is_expert_weight(path: str) -> bool:
    """Return whether a path, or its end, names the stacked expert weights."""
    module, _, name = path.rpartition('.')
    return name in EXPERT_PARAMETERS and module.rpartition('.')[2] == EXPERTS


def expert_names(target_parameters: Any) -> tuple[str, ...]:
    """Return the names in PEFT's `target_parameters`.

    Raises:
        ValueError: a name does not end with the name of stacked expert weights.
    """
    names = cast(list[Any], list(target_parameters or ()))
    if not all(isinstance(name, str) and is_expert_weight(name) for name in names):
        supported = ' or '.join(repr(f'{EXPERTS}.{name}') for name in EXPERT_PARAMETERS)
        raise ValueError(f'target_parameters = {names!r} of PEFT is not supported; each must end with {supported}')
    return tuple(names)


def in_effect(pattern: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return a pattern without the names that never apply, with the longest names first.

    Two names match the same path only if one name ends with the other name, starting after a dot. A name therefore
    never applies if it ends with an earlier name. Of the remaining names, the first match of a path is also the longest
    match, so sorting by length keeps the meaning of the pattern. Therefore the pattern can be sent in a message,
    whose maps have no order.
    """
    kept: dict[str, _Value] = {}
    for name, value in pattern.items():
        if not any(ending in kept for ending in _endings(name)):
            kept[name] = value
    return longest_first(kept)


def longest_first(pattern: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return a pattern sorted by decreasing length of its names, so that the first match is also the longest match."""
    return dict(sorted(pattern.items(), key=lambda item: (-len(item[0]), item[0])))


def _endings(name: str) -> Iterator[str]:
    """Yield the text after each dot of the name, longest first, then an empty string."""
    while name:
        name = name.partition('.')[2]
        yield name


def _check_method(config: Any) -> None:
    """Check that a configuration is for LoRA, because other methods of PEFT have fields with the same names."""
    kind, has_rank = type(config).__name__, hasattr(config, 'r')
    method: Any = getattr(config, 'peft_type', _METHOD)
    if isinstance(config, Mapping):
        method, has_rank = cast(Mapping[str, Any], config).get('peft_type', _METHOD), True
    # PEFT's enumeration of methods is a `str`, whose text differs from its value.
    method = getattr(method, 'value', method)
    supported = 'use a LoraConfig of peft or of twinkle'
    if method != _METHOD:
        raise ValueError(f'{kind} has peft_type {method!r}, which is not supported; {supported}')
    if not has_rank:
        raise TypeError(f'{kind} is not a configuration of an adapter: it has no rank r; {supported}')


def _check_supported(config: Any) -> None:
    """Check that a `peft.LoraConfig` has no setting that would be ignored."""
    for name, supported in _REQUIRED_AT_CREATION.items():
        value = getattr(config, name, None)
        if value not in supported:
            raise ValueError(f'{name} = {value!r} of PEFT is not supported; it must be {supported[-1]!r}')
