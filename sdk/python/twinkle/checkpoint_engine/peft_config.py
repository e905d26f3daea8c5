"""Conversion between `LoraConfig` and PEFT's `adapter_config.json`.

Files that use unsupported features of PEFT, such as DoRA, biases or `modules_to_save`, are refused.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from twinkle.checkpoint_engine.lora_layers import NESTED
from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import (
    ALL_EXPERTS,
    EXPERT_PARAMETERS,
    EXPERTS,
    PEFT_REQUIRED_VALUES,
    TARGET_GROUPS,
    is_expert_weight,
)

_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {'peft_type': ('LORA',), **PEFT_REQUIRED_VALUES}
"""Fields of PEFT that change the computation, with the supported values."""
_PLAIN_INITIALIZATIONS = (None, True, False, 'gaussian', 'orthogonal', 'eva', 'mica')
"""Initializations that do not modify the base model. With others, the adapter belongs to a modified base model."""
_MAX_RANK = (1 << 31) - 1
"""Maximum rank that fits into the wire format."""
_SEEDS = range(-(1 << 63), 1 << 63)
"""Range of seeds that fit into the wire format."""
_MAX_QUOTED = 100
"""Maximum number of characters of an invalid value that are repeated in an error message."""


def _is_number(value: Any) -> bool:
    """Return whether the value is a number in the range of a double; JSON's `NaN` and `Infinity` are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_alpha(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_RANK


def _is_pattern(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_valid, cast(dict[str, Any], value).values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(name, str) for name in cast(list[Any], value))
    )


_IS_VALID: dict[str, Callable[[Any], bool]] = {
    'r': _is_rank,
    'lora_alpha': _is_alpha,
    'lora_dropout': _is_number,
    'target_modules': _are_names,
    'use_rslora': lambda value: isinstance(value, bool),
    'rank_pattern': lambda value: _is_pattern(value, _is_rank),
    'alpha_pattern': lambda value: _is_pattern(value, _is_alpha),
}
"""Checks of the fields that are read."""
_REQUIRED = ('r', 'target_modules')
"""Fields that a file must have."""


def adapter_config_json(config: LoraConfig, *, base_model: str, tensor_names: Iterable[str]) -> bytes:
    """Return the content of an `adapter_config.json` from which PEFT can rebuild the adapter.

    `all-linear` and the other groups are expanded to module names, as in PEFT, because other tools do not support
    groups. Stacked expert weights are written to `target_parameters`. The seed is not written, because PEFT has no
    field for it.

    Args:
        config: the adapter's configuration.
        base_model: hub id or folder of the base model.
        tensor_names: names of the adapter's tensors, as in PEFT.
    """
    modules, parameters = _expanded_targets(config, tensor_names)
    value = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base_model,
        'r': config.r,
        'lora_alpha': _integral(config.lora_alpha),
        'lora_dropout': config.lora_dropout,
        'target_modules': modules,
        **({'target_parameters': parameters} if parameters else {}),
        'use_rslora': config.use_rslora,
        'rank_pattern': dict(config.rank_pattern),
        'alpha_pattern': {name: _integral(alpha) for name, alpha in config.alpha_pattern.items()},
        'bias': 'none',
        'fan_in_fan_out': False,
        'inference_mode': True,
        'init_lora_weights': True,
        'modules_to_save': None,
        'use_dora': False,
    }
    # Only the top level is sorted, because the order of names in a pattern is significant.
    return (json.dumps(dict(sorted(value.items())), indent=2) + '\n').encode()


def _expanded_targets(config: LoraConfig, tensor_names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of modules without groups, and the names of stacked expert weights."""
    # PEFT treats a single string as a regular expression; here it is a name.
    targets = [config.target_modules] if isinstance(config.target_modules, str) else list(config.target_modules)
    parameters = [name for name in targets if is_expert_weight(name)]
    if ALL_EXPERTS in targets:
        parameters = [f'{EXPERTS}.{name}' for name in EXPERT_PARAMETERS]
    modules = [name for name in targets if name != ALL_EXPERTS and not is_expert_weight(name)]
    if set(TARGET_GROUPS).intersection(modules):
        paths = {name.split('.lora_')[0] for name in tensor_names}
        modules = sorted({path.rsplit('.', 1)[-1] for path in paths} - {EXPERTS, NESTED})
    return modules, parameters


def parse_adapter_config(data: bytes, *, seed: int | None = None) -> tuple[LoraConfig, str]:
    """Parse an `adapter_config.json`.

    Args:
        data: content of the file.
        seed: seed of the result.

    Returns:
        The configuration, and the base model, which is empty if the file does not name one.

    Raises:
        ValueError: the file is not a LoRA configuration or uses an unsupported feature.
    """
    try:
        value = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError('the file is not JSON') from None
    if not isinstance(value, dict):
        raise ValueError('the file is not a JSON object')
    fields = cast(dict[str, Any], value)
    for name, supported in _REQUIRED_VALUES.items():
        if fields.get(name) not in supported:
            raise ValueError(f'{name} = {fields.get(name)!r} is not supported; it must be {supported[-1]!r}')
    if fields.get('init_lora_weights', True) not in _PLAIN_INITIALIZATIONS:
        raise ValueError(
            f'init_lora_weights = {fields["init_lora_weights"]!r} is not supported, because it modifies the base '
            "model; save the adapter as a plain LoRA, with PEFT's path_initial_model_for_weight_conversion"
        )
    _check_values(fields)
    if seed is not None and seed not in _SEEDS:
        raise ValueError(f'the seed {seed} does not fit into 64 bits')
    known = {name: fields[name] for name in (*_IS_VALID, 'target_parameters') if name in fields}
    return LoraConfig.of({**known, 'seed': seed}), str(fields.get('base_model_name_or_path') or '')


def _check_values(fields: Mapping[str, Any]) -> None:
    """Refuse missing required fields, and values that have the wrong type or are out of range."""
    for name in _REQUIRED:
        if name not in fields:
            raise ValueError(f'{name} is missing')
    for name, is_valid in _IS_VALID.items():
        if name in fields and not is_valid(fields[name]):
            raise ValueError(f'{name} = {_quoted(fields[name])} has the wrong type or is out of range')


def _quoted(value: Any) -> str:
    """Return the representation of a value for an error message, shortened if necessary."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f'{text[:_MAX_QUOTED]}...'


def _integral(value: float) -> float:
    """Return a whole number as an int, because some tools require one, and other numbers unchanged."""
    return int(value) if value == int(value) else value
