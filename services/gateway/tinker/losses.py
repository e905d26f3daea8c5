"""Tinker's losses: inputs of each datum, options, and the native loss."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.kit.errors import InvalidField
from services.kit.rpc.json_values import struct_of
from twinkle.api.model.v1 import training_config_pb2


@dataclass(frozen=True)
class LossRule:
    """Inputs and options of a loss."""

    required: frozenset[str]
    """Inputs of each datum beside target_tokens."""
    optional: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    """Numbers in loss_fn_config."""
    either: frozenset[str] = frozenset()
    """Names that must be given as an input or as an option."""


_POLICY = frozenset({'logprobs', 'advantages'})
BOUNDS = frozenset({'clip_low_threshold', 'clip_high_threshold'})
"""Bounds of the policy ratio: an option for all datums, or an input with a number for each datum or position."""
_RULES: Mapping[str, LossRule] = {
    'cross_entropy': LossRule(frozenset(), frozenset({'weights'})),
    'importance_sampling': LossRule(_POLICY),
    'ppo': LossRule(_POLICY, BOUNDS, BOUNDS),
    'cispo': LossRule(_POLICY, BOUNDS, BOUNDS),
    'dro': LossRule(_POLICY, options=frozenset({'beta'})),
    'gspo': LossRule(_POLICY | {'sequence_ratio_mask'}, BOUNDS, BOUNDS, BOUNDS),
    'stable_reinforce': LossRule(frozenset({'advantages'}), frozenset({'logprobs'}), frozenset({'kl_coeff'})),
}
_HIGHEST = 1e6
LOSSES = tuple(_RULES)
"""Names of the supported losses."""


def rule_of(loss_fn: str) -> LossRule:
    """Return the rule of a loss.

    Raises:
        InvalidField: The loss is unknown or not supported.
    """
    if loss_fn == 'custom':
        problem = 'custom losses are not run by this server; forward_backward_custom computes them in the client'
        raise InvalidField('loss_fn', problem)
    if loss_fn not in _RULES:
        raise InvalidField('loss_fn', f'must be one of {", ".join(_RULES)}')
    return _RULES[loss_fn]


def loss_config(loss_fn: str, config: Mapping[str, float | str], *, is_wide: bool) -> training_config_pb2.LossConfig:
    """Return the native loss of one batch.

    Args:
        loss_fn: Name of the loss, equal to the native name.
        config: Options.
        is_wide: Whether each position has several targets.

    Raises:
        InvalidField: An option is unknown or out of range, or the loss accepts one target for each position only.
    """
    rule = rule_of(loss_fn)
    for name, value in config.items():
        field = f'loss_fn_config.{name[:100]}'
        if name not in rule.options:
            known = ', '.join(sorted(rule.options)) or 'no options'
            raise InvalidField(field, f'is not an option of {loss_fn}, which takes {known}')
        if isinstance(value, str) or not 0 <= value <= _HIGHEST:
            raise InvalidField(field, f'must be a number, 0 to {_HIGHEST:g}')
    low, high = config.get('clip_low_threshold', 0), config.get('clip_high_threshold', _HIGHEST)
    if float(low) > float(high):
        raise InvalidField('loss_fn_config.clip_low_threshold', 'must not be above clip_high_threshold')
    if is_wide and loss_fn != 'cross_entropy':
        raise InvalidField('data[0].loss_fn_inputs.target_tokens', f'{loss_fn} takes one token a position, shape [N]')
    return training_config_pb2.LossConfig(name=loss_fn, options=struct_of(config))
