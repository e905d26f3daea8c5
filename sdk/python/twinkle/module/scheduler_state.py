"""Schedule state as plain numbers, saved without pickle and restored bitwise.

The learning rates are part of the optimizer's groups and are saved with the optimizer.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, OneCycleLR


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the schedule's numbers and lists of numbers by name, as JSON can store them.

    Other attributes are derived from the options when the schedule is built.
    """
    return {name: value for name, value in scheduler.state_dict().items() if _is_plain(value)}


def load_scheduler_state(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Restore the state of a schedule built with the same options; its rates are restored with the optimizer.

    Raises:
        ValueError: the state belongs to a different schedule, or has values other than numbers; nothing was changed.
    """
    # Private names change between torch releases; the names of a schedule's arguments do not.
    differing = sorted(name for name in scheduler_state(scheduler).keys() ^ state.keys() if name[0] != '_')
    if differing or not all(map(_is_plain, state.values())):
        raise ValueError(f'the state does not belong to a {type(scheduler).__name__}: {differing} differ')
    scheduler.load_state_dict({**scheduler.state_dict(), **state})


def steps_left(scheduler: LRScheduler) -> int | None:
    """Return the number of steps that the schedule can still take, or None for no limit.

    Call this before the optimizer step: torch raises only in the schedule's step, when the weights have changed.
    """
    left = getattr(scheduler, 'steps_left', None)
    if isinstance(left, int):
        return left
    if isinstance(scheduler, OneCycleLR):
        return max(0, scheduler.total_steps - scheduler.last_epoch)
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, int | float)
