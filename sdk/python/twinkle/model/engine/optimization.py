"""An adapter's optimizer and schedule, which are replaced, extended and restored together."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle.component import InvalidComponentOptions
from twinkle.module import build_optimizer, build_scheduler, load_scheduler_state, scheduler_state, steps_left

_ELEMENTWISE = frozenset({'Adam', 'AdamW', 'SGD'})
"""Optimizers whose steps treat each element independently, so that a rank can step its shard of a weight."""


@dataclass(frozen=True)
class ComponentChoice:
    """Configuration of a component, from which it can be built again."""

    component: Any
    """Name or class of the component."""
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the component."""
        return self.component if isinstance(self.component, str) else self.component.__name__


@dataclass(frozen=True)
class Optimization:
    """Optimizer and schedule with their configuration. Their state changes in place."""

    optimizer: Optimizer
    optimizer_choice: ComponentChoice
    scheduler: LRScheduler | None = None
    scheduler_choice: ComponentChoice | None = None

    @classmethod
    def begin(cls, choice: ComponentChoice, parameters: Mapping[str, Tensor]) -> 'Optimization':
        """Return a new optimizer without a schedule.

        Raises:
            UnknownComponent: the name is unknown.
            InvalidComponentOptions: an option is unknown or out of range, or the optimizer does not support sharded
                weights.
        """
        if choice.name not in _ELEMENTWISE and any(isinstance(item, DTensor) for item in parameters.values()):
            problem = f'it does not support sharded weights; use one of {sorted(_ELEMENTWISE)}'
            raise InvalidComponentOptions('optimizer', choice.name, problem)
        return cls(build_optimizer(choice.component, parameters, choice.options), choice)

    def scheduled(self, choice: ComponentChoice, parameters: Mapping[str, Tensor]) -> 'Optimization':
        """Return the same optimizer with a new schedule, based on the optimizer's configured learning rate.

        Raises:
            UnknownComponent, InvalidComponentOptions: see `begin`; nothing was changed.
        """
        # A schedule modifies the groups while it is built. Start from the configured values, and restore the current
        # values if the schedule is refused.
        own = Optimization.begin(self.optimizer_choice, parameters).optimizer
        current = self.copy_groups()
        try:
            self.replace_groups([_values(group) for group in own.param_groups])
            scheduler = build_scheduler(choice.component, self.optimizer, choice.options)
        except ValueError:
            self.replace_groups(current)
            raise
        return Optimization(self.optimizer, self.optimizer_choice, scheduler, choice)

    def extended(self, parameters: Mapping[str, Tensor]) -> 'Optimization':
        """Return the same optimizer over additional parameters; the state of the current parameters is preserved.

        The optimizer is rebuilt, so its groups are as if it had been configured with all parameters.
        """
        extended = Optimization.begin(self.optimizer_choice, parameters)
        if self.scheduler_choice is not None:
            extended = extended.scheduled(self.scheduler_choice, parameters)
        members = {id(item): group for group in self.optimizer.param_groups for item in group['params']}
        for group in extended.optimizer.param_groups:
            old = next((members[id(item)] for item in group['params'] if id(item) in members), None)
            group.update(_values(old) if old is not None else {'lr': self.optimizer.param_groups[0]['lr']})
            for item in group['params']:
                if item in self.optimizer.state:
                    extended.optimizer.state[item] = self.optimizer.state[item]
        if extended.scheduler is not None:
            rates = [group['lr'] for group in extended.optimizer.param_groups]
            counted = {key: value for key, value in scheduler_state(self.scheduler).items() if not _is_list(value)}
            load_scheduler_state(
                extended.scheduler, {**scheduler_state(extended.scheduler), **counted, '_last_lr': rates}
            )
        return extended

    @property
    def is_at_end(self) -> bool:
        """Whether there is a schedule that has no steps left."""
        if self.scheduler is None:
            return False
        if steps_left(self.scheduler) == 0:
            return True
        try:
            with self._restoring_on_error(is_always=True):
                self.advance()
        except (ValueError, ArithmeticError):
            return True
        return False

    def advance(self) -> None:
        """Advance the schedule by one step.

        Raises:
            ValueError, ArithmeticError: the schedule has no steps left; nothing was changed.
        """
        with self._restoring_on_error():
            if self.scheduler.last_epoch:
                self.scheduler.step()
            else:
                self._advance_first()

    def copy_groups(self) -> list[dict[str, Any]]:
        """Return copies of the parameter groups, without the parameters."""
        return [_values(group) for group in self.optimizer.param_groups]

    def replace_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set all values of the parameter groups from `groups`, which `copy_groups` returned."""
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            parameters = group['params']
            group.clear()
            group.update({'params': parameters, **values})

    def _advance_first(self) -> None:
        # Torch warns if the schedule advances before the first optimizer step, but callers may do both in any order.
        # Warning filters are global to the process, so the filter is limited to this call.
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='Detected call of `lr_scheduler.step', category=UserWarning)
            self.scheduler.step()

    @contextmanager
    def _restoring_on_error(self, *, is_always: bool = False) -> Iterator[None]:
        groups, counted = self.copy_groups(), copy.copy(vars(self.scheduler))
        is_successful = False
        try:
            yield
            is_successful = not is_always
        finally:
            if not is_successful:
                vars(self.scheduler).update(counted)
                self.replace_groups(groups)


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != 'params'}


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
