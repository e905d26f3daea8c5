"""Optimizer options that may differ for a single step: numbers that do not determine the optimizer's state."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from twinkle.component import InvalidComponentOptions
from twinkle.module.optimizer import with_tuples
from twinkle.module.rehearsal import rehearse_step

_NOT_FOR_ONE_STEP = frozenset({'initial_accumulator_value', 'lr', 'momentum'})
"""Numbers that determine the state's layout, and the learning rate, which has its own parameter."""


def step_option_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the options that may differ for one step, sorted.

    These are numbers and tuples of numbers that do not determine the optimizer's state.
    """
    return tuple(
        sorted(
            name for name, value in optimizer.defaults.items() if name not in _NOT_FOR_ONE_STEP and _is_numeric(value)
        )
    )


def step_changes(
    optimizer: Optimizer, options: Mapping[str, Any], *, learning_rate: float | None = None
) -> dict[str, Any]:
    """Return the values that one step changes in every parameter group, after a trial on dummy parameters.

    Args:
        optimizer: the optimizer; not modified.
        options: changed options by name, such as `betas`; lists are converted to tuples.
        learning_rate: learning rate of the step; None keeps each group's rate.

    Raises:
        InvalidComponentOptions: an option is unknown, determines the state, or is out of range.
    """
    name, known = type(optimizer).__name__, step_option_names(optimizer)
    unknown = sorted(set(options).difference(known))
    if unknown:
        problem = f'{unknown} cannot be changed for one step; use some of {list(known)}'
        raise InvalidComponentOptions('optimizer', name, problem)
    if not all(_is_numeric(value) for value in options.values()):
        raise InvalidComponentOptions(
            'optimizer', name, f'options must be numbers or lists of numbers, got {dict(options)}'
        )
    changes = with_tuples(options)
    if learning_rate is not None:
        changes['lr'] = learning_rate
    try:
        rehearse_step(optimizer, changes)
    except ValueError as error:
        raise InvalidComponentOptions('optimizer', name, str(error)) from error
    return changes


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_numeric(item) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)
