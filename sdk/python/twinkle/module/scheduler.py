"""Learning-rate schedules: three with warm-up, and the schedules of torch whose options are plain values.

A schedule counts its steps. Before the first step, the rate is the rate of step 0.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle.component import InvalidComponentOptions, UnknownComponent, check_options
from twinkle.module.rehearsal import REFUSALS, problem_of, rehearse_scheduler

_NOT_USABLE = frozenset({
    'LRScheduler', 'LambdaLR', 'MultiplicativeLR', 'SequentialLR', 'ChainedScheduler', 'ReduceLROnPlateau',
})  # fmt: skip
"""Base classes, and schedules that need functions, other schedules or measured values."""

_COUNTS = frozenset({
    'step_size', 'step_size_up', 'step_size_down', 'T_max', 'T_0', 'T_mult', 'total_iters', 'total_steps', 'epochs',
    'steps_per_epoch',
})  # fmt: skip
"""Options that must be positive integers. For some options, such as `T_max`, torch accepts other numbers silently."""


class LinearWarmupScheduler(LRScheduler):
    """Linear warm-up from 0 over `num_warmup_steps`, then linear decay to 0 at `num_training_steps`."""

    def __init__(
        self, optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
    ) -> None:
        _check_counts(num_warmup_steps, num_training_steps)
        self.num_warmup_steps, self.num_training_steps = num_warmup_steps, num_training_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """Return the current rate of each parameter group."""
        return [base * self._factor(self.last_epoch) for base in self.base_lrs]

    def _factor(self, step: int) -> float:
        if step < self.num_warmup_steps:
            return step / self.num_warmup_steps
        return self._decay((step - self.num_warmup_steps) / max(1, self.num_training_steps - self.num_warmup_steps))

    def _decay(self, progress: float) -> float:
        return max(0.0, 1.0 - progress)


class ConstantWarmupScheduler(LinearWarmupScheduler):
    """Linear warm-up from 0 over `num_warmup_steps`, then a constant rate."""

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> None:
        super().__init__(optimizer, num_warmup_steps, 1, last_epoch)

    def _decay(self, progress: float) -> float:
        return 1.0


class CosineWarmupScheduler(LinearWarmupScheduler):
    """Linear warm-up from 0 over `num_warmup_steps`, then `num_cycles` cosine waves.

    The default of half a cycle decays once from the optimizer's rate to 0 (Loshchilov and Hutter 2017,
    arXiv:1608.03983, without restarts).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        num_cycles: float = 0.5,
        last_epoch: int = -1,
    ) -> None:
        if not _is_number(num_cycles):
            raise ValueError(f'num_cycles must be a number, got {num_cycles!r}')
        self.num_cycles = num_cycles
        super().__init__(optimizer, num_warmup_steps, num_training_steps, last_epoch)

    def _decay(self, progress: float) -> float:
        return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * self.num_cycles * min(1.0, progress))))


def scheduler_names() -> tuple[str, ...]:
    """Return the names that `build_scheduler` accepts, sorted."""
    return tuple(sorted(_classes()))


def build_scheduler(
    scheduler: str | type[LRScheduler], optimizer: Optimizer, options: Mapping[str, Any]
) -> LRScheduler:
    """Build a schedule of the optimizer's learning rate, and set the rate of step 0.

    Raises:
        UnknownComponent: the name is unknown.
        InvalidComponentOptions: an option is unknown, missing or out of range.
    """
    cls = _classes().get(scheduler) if isinstance(scheduler, str) else scheduler
    if cls is None:
        raise UnknownComponent('lr_scheduler', str(scheduler), scheduler_names())
    check_options('lr_scheduler', cls.__name__, cls, options, given=('optimizer',))
    _check_counted(cls.__name__, options)
    if isinstance(scheduler, str):
        _check_values(cls, options)
    converted = {name: int(value) if _is_whole(value) else value for name, value in options.items()}
    try:
        rehearse_scheduler(cls, converted, optimizer)
        return cls(optimizer, **converted)
    except REFUSALS as error:
        raise InvalidComponentOptions('lr_scheduler', cls.__name__, problem_of(error, options)) from error


def _is_whole(value: Any) -> bool:
    # Protobuf's Struct has only floats, and torch's schedules require ints for counts.
    return isinstance(value, float) and value.is_integer() and abs(value) < 2**53


def _check_counted(name: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if option in _COUNTS and value is not None and not _is_count(value):
            raise InvalidComponentOptions(
                'lr_scheduler', name, f'{option} must be an integer of at least 1, got {value!r}'
            )
    milestones = options.get('milestones', ())
    if not isinstance(milestones, list | tuple) or not all(_is_count(item) for item in milestones):
        raise InvalidComponentOptions('lr_scheduler', name, 'milestones must be a list of integers of at least 1')


def _check_values(cls: type[LRScheduler], options: Mapping[str, Any]) -> None:
    """Check values that would otherwise fail only after some steps."""
    parameters = inspect.signature(cls).parameters
    for option, value in options.items():
        is_word = option in parameters and isinstance(parameters[option].default, str)
        items = value if isinstance(value, list | tuple) else [value]
        is_none_allowed = option in parameters and parameters[option].default is None
        if not is_word and not all(
            isinstance(item, bool) or _is_number(item) or (item is None and is_none_allowed) for item in items
        ):
            raise InvalidComponentOptions('lr_scheduler', cls.__name__, f'{option} must be a number, got {value!r}')
    power = options.get('power', 1.0)
    if cls.__name__ == 'PolynomialLR' and not (_is_number(power) and power >= 0):
        raise InvalidComponentOptions(
            'lr_scheduler', cls.__name__, f'power must be a number of at least 0, got {power!r}'
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and float(value).is_integer()


def _check_counts(num_warmup_steps: int, num_training_steps: int) -> None:
    if not _is_count(num_warmup_steps + 1) or not _is_count(num_training_steps):
        raise ValueError(
            'num_warmup_steps must be an integer of at least 0 and num_training_steps one of at least 1, '
            f'got {num_warmup_steps} and {num_training_steps}'
        )


def _classes() -> dict[str, type[LRScheduler]]:
    from_torch = {
        name: cls
        for name, cls in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(cls) and issubclass(cls, LRScheduler) and name not in _NOT_USABLE and name[0] != '_'
    }
    own = {cls.__name__: cls for cls in (ConstantWarmupScheduler, CosineWarmupScheduler, LinearWarmupScheduler)}
    return {**from_torch, **own}
