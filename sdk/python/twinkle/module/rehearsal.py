"""Tries optimizers and schedules on a parameter of no use before they get the real ones.

torch checks some options only at a step: there, a wrong one would break the training it was set for.
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
"""What torch raises for options of no use."""

_STEPS = 3
"""Some options, such as the dampening of SGD, matter from the second step on."""


def problem_of(error: Exception, options: Mapping[str, Any]) -> str:
    """Return what one of `REFUSALS` means to who gave the options."""
    # Other kinds speak of the code that met them, and not of the values.
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f'there are values of no use among {dict(options)}'


class _Rates(Optimizer):
    """The parameter groups of an optimizer, and no parameters worth the name."""

    def step(self, closure: Any = None) -> None:
        """Change nothing."""


def rehearse_optimizer(cls: type[Optimizer], options: Mapping[str, Any], *, like: Tensor) -> None:
    """Take a few steps on a parameter of the dtype and device of `like`; raises one of `REFUSALS`."""
    parameter = torch.ones(2, 2, dtype=like.dtype, device=like.device, requires_grad=True)
    optimizer = cls([parameter], **options)
    for _ in range(_STEPS):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    if not bool(parameter.isfinite().all()):
        raise ValueError(f'{_STEPS} steps with them make weights that are not finite')


def rehearse_step(optimizer: Optimizer, changes: Mapping[str, Any] | None = None) -> None:
    """Take steps with what the groups hold now, some of it changed, on parameters of no use.

    Where torch raises in the middle of a real step, some weights are changed and others are not.

    Raises:
        ValueError: they cannot be taken.
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
    """Move the schedule once on a copy of the optimizer's groups; raises one of `REFUSALS`."""
    copies = [{**group, 'params': [torch.zeros(1)]} for group in optimizer.param_groups]
    rates = _Rates(copies, dict(optimizer.defaults))
    schedule = cls(rates, **options)
    rates.step()
    schedule.step()
    if not all(math.isfinite(group['lr']) for group in rates.param_groups):
        raise ValueError('the rate after one move is not finite')
