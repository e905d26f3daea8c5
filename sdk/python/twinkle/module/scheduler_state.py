"""What a schedule has counted as plain numbers, to be kept without pickling and put back to the bit.

The rates themselves are in the optimizer's groups and are kept with the optimizer.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, OneCycleLR


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return numbers and lists of numbers by name; JSON keeps all of them.

    What is neither follows from the options and is built again from them.
    """
    return {name: value for name, value in scheduler.state_dict().items() if _is_plain(value)}


def load_scheduler_state(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Put numbers back into a schedule that was built with the same options; its rates come with the optimizer.

    Raises:
        ValueError: the state is of another schedule; nothing was changed.
    """
    # Private names come and go with torch's releases; what a schedule's own arguments became does not.
    differing = sorted(name for name in scheduler_state(scheduler).keys() ^ state.keys() if name[0] != '_')
    if differing or not all(map(_is_plain, state.values())):
        raise ValueError(f'the state is not of a {type(scheduler).__name__}: {differing} differ')
    scheduler.load_state_dict({**scheduler.state_dict(), **state})


def moves_left(scheduler: LRScheduler) -> int | None:
    """Return how often the schedule can still be moved; None: for ever.

    Ask before a step is applied whose schedule is to be moved after it: torch refuses the move when
    the step is done already.
    """
    left = getattr(scheduler, 'moves_left', None)
    if isinstance(left, int):
        return left
    if isinstance(scheduler, OneCycleLR):
        return max(0, scheduler.total_steps - scheduler.last_epoch)
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, int | float)
