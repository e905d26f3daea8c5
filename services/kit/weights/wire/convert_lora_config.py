"""Conversion of LoRA configurations between messages and the library's values, with all checks."""

import math

from twinkle.api.model.v1 import training_config_pb2
from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import ALL_LINEAR, in_effect, longest_first
from twinkle_services.kit.errors import InvalidField

MAX_NAMES = 4096
"""Maximum number of layer names in one list; no model has as many layers."""


def lora_config_to_proto(config: LoraConfig) -> training_config_pb2.LoraConfig:
    """Return the message of `config`. Names without an effect are omitted from its patterns."""
    targets = config.target_modules
    return training_config_pb2.LoraConfig(
        lora_rank=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=[targets] if isinstance(targets, str) else targets,
        is_rank_stabilized=config.use_rslora,
        rank_pattern=in_effect(config.rank_pattern),
        alpha_pattern=in_effect(config.alpha_pattern),
        seed=config.seed,
    )


def lora_config_from_proto(message: training_config_pb2.LoraConfig, field: str) -> LoraConfig:
    """Return the configuration of a message, with defaults for unset fields.

    Args:
        message: Message to convert.
        field: Path of the message in the request, for errors.

    Raises:
        InvalidField: A value is out of range, or a list has an empty name or too many names.
    """
    default = LoraConfig()
    rank = message.lora_rank if message.HasField('lora_rank') else default.r
    alpha = message.lora_alpha if message.HasField('lora_alpha') else default.lora_alpha
    dropout = message.lora_dropout if message.HasField('lora_dropout') else default.lora_dropout
    _check(field, 'lora_rank', is_valid=rank >= 1, rule=f'must be at least 1, got {rank}')
    _check(field, 'lora_alpha', is_valid=_is_positive(alpha), rule=f'must be positive and finite, got {alpha}')
    _check(field, 'lora_dropout', is_valid=0 <= dropout < 1, rule=f'must be at least 0 and less than 1, got {dropout}')
    _check(field, 'target_modules', is_valid='' not in message.target_modules, rule='must not have an empty name')
    for name in ('target_modules', 'rank_pattern', 'alpha_pattern'):
        count = len(getattr(message, name))
        _check(field, name, is_valid=count <= MAX_NAMES, rule=f'must have at most {MAX_NAMES} names, got {count}')
    for name, value in message.rank_pattern.items():
        _check(field, f'rank_pattern[{name!r}]', is_valid=value >= 1, rule=f'must be at least 1, got {value}')
    for name, value in message.alpha_pattern.items():
        _check(
            field,
            f'alpha_pattern[{name!r}]',
            is_valid=_is_positive(value),
            rule=f'must be positive and finite, got {value}',
        )
    targets = tuple(message.target_modules)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=ALL_LINEAR if targets in ((), (ALL_LINEAR,)) else targets,
        use_rslora=message.is_rank_stabilized,
        rank_pattern=longest_first(message.rank_pattern),
        alpha_pattern=longest_first(message.alpha_pattern),
        seed=message.seed if message.HasField('seed') else None,
    )


def _check(field: str, name: str, *, is_valid: bool, rule: str) -> None:
    if not is_valid:
        raise InvalidField(f'{field}.{name}', rule)


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
