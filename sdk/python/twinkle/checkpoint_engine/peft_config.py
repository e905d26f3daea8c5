"""`adapter_config.json`: our LoRA configuration in peft's words, and back.

What peft can say and our layers cannot do (DoRA, biases, modules saved whole) is refused on
reading, never dropped.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import PEFT_NEEDED, TARGET_GROUPS

_NEEDED: Mapping[str, tuple[Any, ...]] = {'peft_type': ('LORA',), **PEFT_NEEDED}
"""Fields of peft that change the computation, with the values we can honour."""
_PLAIN_STARTS = (None, True, False, 'gaussian', 'orthogonal', 'eva', 'mica')
"""Ways to begin that leave the base model as it is; the others train against one they changed."""


_MAX_RANK = (1 << 31) - 1
_SEEDS = range(-(1 << 63), 1 << 63)
"""What fits where a configuration travels and is kept."""
_MAX_TOLD = 100
"""Characters of a wrong value that are repeated to whoever sent it."""


def _is_number(value: Any) -> bool:
    """Whether it is a number that a double can hold, which JSON's `NaN`, `Infinity` and long integers are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_alpha(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_RANK


def _is_pattern(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_valid, cast(dict[str, Any], value).values()))


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(name, str) for name in cast(list[Any], value))
    )


_IS_VALID: dict[str, Callable[[Any], bool]] = {
    'r': _is_rank,
    'lora_alpha': _is_alpha,
    'lora_dropout': _is_number,
    'target_modules': _is_names,
    'use_rslora': lambda value: isinstance(value, bool),
    'rank_pattern': lambda value: _is_pattern(value, _is_rank),
    'alpha_pattern': lambda value: _is_pattern(value, _is_alpha),
}
"""The fields we read, with what their values have to be."""
_REQUIRED = ('r', 'target_modules')


def adapter_config_json(config: LoraConfig, *, base_model: str, tensor_names: Iterable[str]) -> bytes:
    """Return the file that makes peft rebuild the adapter.

    `all-linear` and the other groups are written as the module names they stood for, as peft itself does,
    since other tools do not know the words. The seed is not written: peft has no field for it.

    Args:
        config: The adapter's configuration.
        base_model: Hub id or folder of the base model.
        tensor_names: The adapter's tensors by peft's names.
    """
    targets = config.target_modules
    if set(TARGET_GROUPS).intersection((targets,) if isinstance(targets, str) else targets):
        targets = sorted({name.split('.lora_')[0].rsplit('.', 1)[-1] for name in tensor_names})
    # A lone string is a name to us and a regular expression to peft.
    targets = [targets] if isinstance(targets, str) else list(targets)
    value = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base_model,
        'r': config.r,
        'lora_alpha': _integral(config.lora_alpha),
        'lora_dropout': config.lora_dropout,
        'target_modules': targets,
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
    # Sorted at the top alone: of a pattern's names the first that fits counts, for peft and for us.
    return (json.dumps(dict(sorted(value.items())), indent=2) + '\n').encode()


def parse_adapter_config(data: bytes, *, seed: int | None = None) -> tuple[LoraConfig, str]:
    """Read an `adapter_config.json`.

    Args:
        data: The file.
        seed: The seed to put into the result.

    Returns:
        The configuration and the base model, which is empty where the file names none.

    Raises:
        ValueError: it is no LoRA configuration, or one with a feature that is not supported.
    """
    try:
        value = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError('it is no JSON') from None
    if not isinstance(value, dict):
        raise ValueError('it is no JSON object')
    fields = cast(dict[str, Any], value)
    for name, supported in _NEEDED.items():
        if fields.get(name) not in supported:
            raise ValueError(f'{name} = {fields.get(name)!r} is not supported; it has to be {supported[-1]!r}')
    if fields.get('init_lora_weights', True) not in _PLAIN_STARTS:
        raise ValueError(
            f'init_lora_weights = {fields["init_lora_weights"]!r} is not supported: the adapter belongs to a base '
            'model with other weights; save it with path_initial_model_for_weight_conversion, as a plain LoRA'
        )
    _check_values(fields)
    if seed is not None and seed not in _SEEDS:
        raise ValueError('the seed does not fit into 64 bits')
    known = {name: fields[name] for name in _IS_VALID if name in fields}
    return LoraConfig.of({**known, 'seed': seed}), str(fields.get('base_model_name_or_path') or '')


def _check_values(fields: Mapping[str, Any]) -> None:
    """Refuse a field that is absent where it must not be, of the wrong type, or out of range."""
    for name in _REQUIRED:
        if name not in fields:
            raise ValueError(f'{name} is missing')
    for name, is_valid in _IS_VALID.items():
        if name in fields and not is_valid(fields[name]):
            raise ValueError(f'{name} = {_told(fields[name])} has the wrong type or is out of range')


def _told(value: Any) -> str:
    """Return a value as a message repeats it."""
    text = repr(value)
    return text if len(text) <= _MAX_TOLD else f'{text[:_MAX_TOLD]}...'


def _integral(value: float) -> float:
    """Write whole numbers without a point, as tools that ask for an int expect."""
    return int(value) if value == int(value) else value
