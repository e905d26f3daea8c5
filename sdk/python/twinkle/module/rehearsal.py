"""Trial runs of optimizers and schedules on dummy parameters before their use with real parameters.

Torch checks some options only during a step, where an invalid option would break the training run.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AssertionError)
"""Exceptions that torch raises for invalid options."""

_STEPS = 3
"""Number of trial steps; some options, such as SGD's dampening, only matter from the second step on."""


def problem_of(error: Exception, options: Mapping[str, Any]) -> str:
    """Return a message for the user about one of `REFUSALS`."""
    # Messages of other exceptions describe the code that failed, not the option.
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f'there are invalid values among {dict(options)}'


class _Rates(Optimizer):
    """Optimizer with given parameter groups whose step does nothing."""

    def step(self, closure: Any = None) -> None:
        """Change no parameter."""


def rehearse_optimizer(cls: type[Optimizer], options: Mapping[str, Any], *, like: Tensor) -> None:
    """Take a few steps on a dummy parameter with the dtype and device of `like`; raises one of `REFUSALS`."""
    parameter = torch.ones(2, 2, dtype=like.dtype, device=like.device, requires_grad=True)
    optimizer = cls([parameter], **options)
    for _ in range(_STEPS):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    if not bool(parameter.isfinite().all()):
        raise ValueError(f'{_STEPS} steps with these options make weights that are not finite')


def rehearse_step(optimizer: Optimizer, changes: Mapping[str, Any] | None = None) -> None:
    """Take trial steps on dummy parameters with the options of each group of an optimizer, overridden by `changes`.

    An exception during a real step would leave only some of the weights changed.

    Raises:
        ValueError: the options are invalid.
    """
    known = inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name in known and name != 'params'}
        options.update(changes or {})
        try:
            rehearse_optimizer(type(optimizer), options, like=group['params'][0])
        except REFUSALS as error:
            raise ValueError(problem_of(error, changes or options)) from error


def rehearse_scheduler(cls: type[LRScheduler], options: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Step a schedule once on a copy of the optimizer's groups; raises one of `REFUSALS`."""
    copies = [{**group, 'params': [torch.zeros(1)]} for group in optimizer.param_groups]
    rates = _Rates(copies, dict(optimizer.defaults))
    schedule = cls(rates, **options)
    rates.step()
    schedule.step()
    if not all(math.isfinite(group['lr']) for group in rates.param_groups):
        raise ValueError('the learning rate after one step of the schedule is not finite')
