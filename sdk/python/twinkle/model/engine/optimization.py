"""An adapter's optimizer and the schedule of its rate, which are replaced, grown and restored together."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twinkle.module import build_optimizer, build_scheduler, load_scheduler_state, moves_left, scheduler_state


@dataclass(frozen=True)
class ComponentChoice:
    """A component as it was asked for, so that it can be built again."""

    component: Any
    """Name or class."""
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.component if isinstance(self.component, str) else self.component.__name__


@dataclass(frozen=True)
class Optimization:
    """An optimizer, its schedule, and how both were asked for. What they gather changes in place."""

    optimizer: Optimizer
    optimizer_choice: ComponentChoice
    scheduler: LRScheduler | None = None
    scheduler_choice: ComponentChoice | None = None

    @classmethod
    def begin(cls, choice: ComponentChoice, parameters: Mapping[str, Tensor]) -> 'Optimization':
        """Return a new optimizer without a schedule.

        Raises:
            UnknownComponent: the name is not known.
            InvalidComponentOptions: an option is unknown or out of range.
        """
        return cls(build_optimizer(choice.component, parameters, choice.options), choice)

    def scheduled(self, choice: ComponentChoice, parameters: Mapping[str, Tensor]) -> 'Optimization':
        """Return the same optimizer with a new schedule, which counts from the optimizer's own rate.

        Raises:
            UnknownComponent, InvalidComponentOptions: as `begin`; nothing was changed.
        """
        # A schedule writes into the groups while it is built: begin from the optimizer's own
        # values, and put the present ones back if it is refused.
        own = Optimization.begin(self.optimizer_choice, parameters).optimizer
        present = self.copy_groups()
        try:
            self.replace_groups([_values(group) for group in own.param_groups])
            scheduler = build_scheduler(choice.component, self.optimizer, choice.options)
        except ValueError:
            self.replace_groups(present)
            raise
        return Optimization(self.optimizer, self.optimizer_choice, scheduler, choice)

    def over_more(self, parameters: Mapping[str, Tensor]) -> 'Optimization':
        """Return the same over more parameters: what was gathered for the present ones is kept.

        The optimizer is built again, so that its groups are what they would be had it been set now.
        """
        grown = Optimization.begin(self.optimizer_choice, parameters)
        if self.scheduler_choice is not None:
            grown = grown.scheduled(self.scheduler_choice, parameters)
        members = {id(item): group for group in self.optimizer.param_groups for item in group['params']}
        for group in grown.optimizer.param_groups:
            old = next((members[id(item)] for item in group['params'] if id(item) in members), None)
            group.update(_values(old) if old is not None else {'lr': self.optimizer.param_groups[0]['lr']})
            for item in group['params']:
                if item in self.optimizer.state:
                    grown.optimizer.state[item] = self.optimizer.state[item]
        if grown.scheduler is not None:
            rates = [group['lr'] for group in grown.optimizer.param_groups]
            counted = {key: value for key, value in scheduler_state(self.scheduler).items() if not _is_list(value)}
            load_scheduler_state(grown.scheduler, {**scheduler_state(grown.scheduler), **counted, '_last_lr': rates})
        return grown

    @property
    def is_at_end(self) -> bool:
        """Whether there is a schedule that cannot be moved any more."""
        if self.scheduler is None:
            return False
        if moves_left(self.scheduler) == 0:
            return True
        try:
            with self._undoing_moves(is_always=True):
                self.move()
        except (ValueError, ArithmeticError):
            return True
        return False

    def move(self) -> None:
        """Move the schedule by one step.

        Raises:
            ValueError, ArithmeticError: it has no moves left; nothing was changed.
        """
        with self._undoing_moves():
            if self.scheduler.last_epoch:
                self.scheduler.step()
            else:
                self._move_first()

    def copy_groups(self) -> list[dict[str, Any]]:
        """Return copies of the parameter groups, without the parameters."""
        return [_values(group) for group in self.optimizer.param_groups]

    def replace_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set all values of the parameter groups to those of a copy."""
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            parameters = group['params']
            group.clear()
            group.update({'params': parameters, **values})

    def _move_first(self) -> None:
        # torch warns of a first move before the first step; here the two are verbs of their own, and which
        # comes first is the caller's to say. Filters belong to the whole process, so this is for that move alone.
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='Detected call of `lr_scheduler.step', category=UserWarning)
            self.scheduler.step()

    @contextmanager
    def _undoing_moves(self, *, is_always: bool = False) -> Iterator[None]:
        groups, counted = self.copy_groups(), copy.copy(vars(self.scheduler))
        is_kept = False
        try:
            yield
            is_kept = not is_always
        finally:
            if not is_kept:
                vars(self.scheduler).update(counted)
                self.replace_groups(groups)


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != 'params'}


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
