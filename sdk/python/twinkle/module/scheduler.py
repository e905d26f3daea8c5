"""Learning-rate schedules: three with warm-up, and those of torch that need nothing but numbers.

A schedule counts its own moves: before the first, the rate is that of move 0.
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
"""They want functions, other schedules or a measured value."""

_COUNTS = frozenset({
    'step_size', 'step_size_up', 'step_size_down', 'T_max', 'T_0', 'T_mult', 'total_iters', 'total_steps', 'epochs',
    'steps_per_epoch',
})  # fmt: skip
"""Options of torch's schedules that count moves; torch takes any number and quietly does something else."""


class LinearWarmupScheduler(LRScheduler):
    """Straight lines: from 0 up to the optimizer's rate in `num_warmup_steps`, down to 0 at `num_training_steps`."""

    def __init__(
        self, optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
    ) -> None:
        _check_counts(num_warmup_steps, num_training_steps)
        self.num_warmup_steps, self.num_training_steps = num_warmup_steps, num_training_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group at the present move."""
        return [base * self._factor(self.last_epoch) for base in self.base_lrs]

    def _factor(self, move: int) -> float:
        if move < self.num_warmup_steps:
            return move / self.num_warmup_steps
        return self._decay((move - self.num_warmup_steps) / max(1, self.num_training_steps - self.num_warmup_steps))

    def _decay(self, progress: float) -> float:
        return max(0.0, 1.0 - progress)


class ConstantWarmupScheduler(LinearWarmupScheduler):
    """From 0 up in a straight line in `num_warmup_steps`, then the optimizer's rate for ever."""

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> None:
        super().__init__(optimizer, num_warmup_steps, 1, last_epoch)

    def _decay(self, progress: float) -> float:
        return 1.0


class CosineWarmupScheduler(LinearWarmupScheduler):
    """From 0 up in a straight line in `num_warmup_steps`, then along `num_cycles` waves of a cosine.

    Half a cycle, the default, goes from the optimizer's rate to 0 once (Loshchilov and Hutter 2017,
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
    """Return the names `build_scheduler` takes, sorted."""
    return tuple(sorted(_classes()))


def build_scheduler(
    scheduler: str | type[LRScheduler], optimizer: Optimizer, options: Mapping[str, Any]
) -> LRScheduler:
    """Return a schedule of `optimizer`'s rate; it sets the rate of move 0 at once.

    Raises:
        UnknownComponent: the name is not known.
        InvalidComponentOptions: an option is unknown, missing or out of range.
    """
    cls = _classes().get(scheduler) if isinstance(scheduler, str) else scheduler
    if cls is None:
        raise UnknownComponent('lr_scheduler', str(scheduler), scheduler_names())
    check_options('lr_scheduler', cls.__name__, cls, options, given=('optimizer',))
    _check_counted(cls.__name__, options)
    if isinstance(scheduler, str):
        _check_values(cls, options)
    whole = {name: int(value) if _is_whole(value) else value for name, value in options.items()}
    try:
        rehearse_scheduler(cls, whole, optimizer)
        return cls(optimizer, **whole)
    except REFUSALS as error:
        raise InvalidComponentOptions('lr_scheduler', cls.__name__, problem_of(error, options)) from error


def _is_whole(value: Any) -> bool:
    # Protobuf's Struct has one kind of number, and torch's schedules insist on ints for counts.
    return isinstance(value, float) and value.is_integer() and abs(value) < 2**53


def _check_counted(name: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if option in _COUNTS and value is not None and not _is_count(value):
            raise InvalidComponentOptions(
                'lr_scheduler', name, f'{option} must be a whole number from 1 on, got {value!r}'
            )
    milestones = options.get('milestones', ())
    if not isinstance(milestones, list | tuple) or not all(_is_count(item) for item in milestones):
        raise InvalidComponentOptions('lr_scheduler', name, 'milestones must be a list of whole numbers from 1 on')


def _check_values(cls: type[LRScheduler], options: Mapping[str, Any]) -> None:
    """Refuse what a schedule would stumble over only when it gets there, moves later."""
    parameters = inspect.signature(cls).parameters
    for option, value in options.items():
        is_word = option in parameters and isinstance(parameters[option].default, str)
        items = value if isinstance(value, list | tuple) else [value]
        is_none_welcome = option in parameters and parameters[option].default is None
        if not is_word and not all(
            isinstance(item, bool) or _is_number(item) or (item is None and is_none_welcome) for item in items
        ):
            raise InvalidComponentOptions('lr_scheduler', cls.__name__, f'{option} must be a number, got {value!r}')
    power = options.get('power', 1.0)
    if cls.__name__ == 'PolynomialLR' and not (_is_number(power) and power >= 0):
        raise InvalidComponentOptions(
            'lr_scheduler', cls.__name__, 'power must be a number from 0 on: below, the last move divides by 0'
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and float(value).is_integer()


def _check_counts(num_warmup_steps: int, num_training_steps: int) -> None:
    if not _is_count(num_warmup_steps + 1) or not _is_count(num_training_steps):
        raise ValueError(
            'num_warmup_steps must be a whole number from 0 and num_training_steps one from 1 on, '
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
