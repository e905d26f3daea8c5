"""Decides which parts of an adapter's history the journal stores for restore and undo."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from twinkle.data_format import StepResult
from twinkle_services.kit.errors import DomainError
from twinkle_services.model.domain.operation import ClipGradAndStep, Operation, Step
from twinkle_services.model.domain.result import OperationResult

MIN_SNAPSHOTS = 2
"""Number of snapshots that are always stored. If the newest is damaged, the adapter is restored from the one before."""


@dataclass(frozen=True)
class Retention:
    """Parts of the history to store; all other parts may be deleted."""

    steps: tuple[int, ...]
    """Operations that applied a step and can be undone, in order."""
    snapshots: frozenset[int]
    """Operation numbers of the snapshots."""
    ranges: tuple[tuple[int, int | None], ...]
    """Replayable operations, as ranges of numbers that exclude both bounds; None means no upper bound."""

    def is_replayable(self, number: int) -> bool:
        """Return whether an operation's payload must be stored."""
        return any(low < number and (high is None or number < high) for low, high in self.ranges)


def retain(steps: Sequence[int], snapshots: Sequence[int], *, undo_steps: int) -> Retention:
    """Return the parts of an adapter's history to store.

    The state before a step is restored from the newest snapshot before it and the operations between the two. Without
    that snapshot, the step cannot be undone.

    Args:
        steps: Operations that applied a step and were not undone, in order.
        snapshots: Operation numbers that a restore can start from, ascending; 0 is the adapter's creation.
        undo_steps: Maximum number of steps that can be undone.
    """
    last = steps[-undo_steps:] if undo_steps else ()
    bases = {step: max((number for number in snapshots if number < step), default=-1) for step in last}
    undoable = tuple(step for step in last if bases[step] >= 0)
    roots = snapshots[-MIN_SNAPSHOTS:]
    ranges = [(bases[step], step) for step in undoable] + [(number, None) for number in roots[:1]]
    return Retention(undoable, frozenset([*roots, *(bases[step] for step in undoable)]), tuple(ranges))


class ReplayKind(IntEnum):
    """The treatment of an operation during a restore."""

    REPLAYED = 1
    """The operation is run again."""
    SKIPPED = 2
    """The operation did not change the engine and is skipped."""
    BARRIER = 3
    """The operation changed the state in a way that replay cannot repeat; a restore starts after it."""


def is_applied_step(operation: Operation, outcome: OperationResult | DomainError) -> bool:
    """Return whether an operation applied an optimizer step."""
    if not isinstance(operation.verb, Step | ClipGradAndStep) or isinstance(outcome, DomainError):
        return False
    return isinstance(outcome.outcome, StepResult) and outcome.outcome.is_applied
