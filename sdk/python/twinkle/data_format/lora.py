"""The LoRA configuration of an adapter, torch-free.

It carries peft's names, so a `peft.LoraConfig` can be given wherever one of these is
asked for: `LoraConfig.of` reads the fields that both have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

_Value = TypeVar('_Value')
ALL_LINEAR = 'all-linear'
"""Every linear layer of the model except its output head."""
ALL_ATTENTION = 'all-attention'
"""The linear layers of attention, whatever the architecture calls them."""
ALL_MLP = 'all-mlp'
"""Every linear layer that is neither of attention nor the output head."""
OUTPUT_HEAD = 'output-head'
"""The output head; where it is tied to the embeddings, those stay as they are."""
TARGET_GROUPS = (ALL_LINEAR, ALL_ATTENTION, ALL_MLP, OUTPUT_HEAD)
"""Names in `target_modules` that stand for layers of whatever name; they mix with plain ones."""

PEFT_NEEDED: Mapping[str, tuple[Any, ...]] = {
    'bias': (None, 'none'),
    'use_dora': (None, False),
    'modules_to_save': (None, []),
    'fan_in_fan_out': (None, False),
    'layer_replication': (None, []),
    'trainable_token_indices': (None, [], {}),
    'lora_bias': (None, False),
    'target_parameters': (None, []),
    'use_qalora': (None, False),
    'use_bdlora': (None, False),
    'alora_invocation_tokens': (None, []),
    'arrow_config': (None, {}),
    'kasa_config': (None, {}),
    'velora_config': (None, {}),
    'monteclora_config': (None, {}),
    'megatron_config': (None, {}),
}
"""Fields of peft that change what the layers compute, with the values our layers can honour."""
_NEEDED_TO_BEGIN: Mapping[str, tuple[Any, ...]] = {
    **PEFT_NEEDED,
    'init_lora_weights': (None, True),
    'exclude_modules': (None, [], set[str]()),
    'layers_to_transform': (None, []),
    'layers_pattern': (None, []),
}
"""The same for an adapter that is yet to be made."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adaptation of linear layers (Hu et al. 2021, arXiv:2106.09685, section 4.1).

    The adapted layer computes `W x + scaling * B A x` with `A` of shape `[r, in]` and `B` of
    shape `[out, r]`.
    """

    r: int = 8
    """LoRA rank, at least 1."""
    lora_alpha: float = 16.0
    """Scale numerator: `scaling = lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora`."""
    lora_dropout: float = 0.0
    """Probability in [0, 1) of dropping an input element of `A` while training."""
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    """`'all-linear'`, or names matched against the end of each module's dotted path, `TARGET_GROUPS` among them."""
    use_rslora: bool = False
    """Rank-stabilised scaling (Kalajdzievski 2023, arXiv:2312.03732)."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    """Module name suffix to a rank other than `r`. Of several that fit a path the first counts, as in peft."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    """Module name suffix to an alpha other than `lora_alpha`. Of several that fit a path the first counts."""
    seed: int | None = None
    """Seed of `A`'s initial values and of dropout. Unset: drawn by the owner and reported back."""

    def __post_init__(self) -> None:
        """Refuse values no layer could be built from.

        Raises:
            ValueError: names the field and the cure.
        """
        if self.r < 1:
            raise ValueError(f'r must be at least 1, got {self.r}')
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ValueError(f'lora_dropout must be in [0, 1), got {self.lora_dropout}')
        if not self.lora_alpha > 0.0:
            raise ValueError(f'lora_alpha must be positive, got {self.lora_alpha}')
        if not self.target_modules:
            raise ValueError("target_modules is empty; name modules or give 'all-linear'")

    @classmethod
    def of(cls, config: Any) -> 'LoraConfig':
        """Return `config` as a `LoraConfig`.

        Args:
            config: a `LoraConfig`, a mapping with its fields, or a `peft.LoraConfig`.

        Raises:
            TypeError: a mapping has a key that is no field.
            ValueError: a value is out of range, or a `peft.LoraConfig` asks for what is not supported.
        """
        if isinstance(config, LoraConfig):
            return config
        if isinstance(config, Mapping):
            values = dict(cast(Mapping[str, Any], config))
        else:
            _check_honoured(config)
            known = (item.name for item in fields(cls))
            values = {name: getattr(config, name) for name in known if hasattr(config, name)}
        values = {name: value for name, value in values.items() if value is not None}
        targets = values.get('target_modules', ALL_LINEAR)
        if not isinstance(targets, str):
            values['target_modules'] = tuple(sorted(targets))
        return cls(**values)


def in_effect(pattern: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return a pattern without the names that never count, its longest names first.

    Two names fit one path only if one of them ends with the other from a dot on. So a name behind one that it ends
    with counts nowhere; among the others the first that fits a path is the longest that does, in whatever order
    they came. This is how a pattern goes through a message, whose maps have no order, and means the same after it.
    """
    kept: dict[str, _Value] = {}
    for name, value in pattern.items():
        if not any(ending in kept for ending in _endings(name)):
            kept[name] = value
    return longest_first(kept)


def longest_first(pattern: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return a pattern of which the longest name that fits a path counts, as one of which the first does."""
    return dict(sorted(pattern.items(), key=lambda item: (-len(item[0]), item[0])))


def _endings(name: str) -> Iterator[str]:
    """Yield what follows each dot."""
    while name:
        name = name.partition('.')[2]
        yield name


def _check_honoured(config: Any) -> None:
    """Refuse a `peft.LoraConfig` of which something would be dropped."""
    for name, honoured in _NEEDED_TO_BEGIN.items():
        value = getattr(config, name, None)
        if value not in honoured:
            raise ValueError(f'{name} = {value!r} of peft is not supported; it has to be {honoured[-1]!r}')
