"""What a journal keeps of one adapter: for restoring it, and for undoing its last steps. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from services.kit.errors import DomainError
from services.model.domain.operation import ClipGradAndStep, Operation, Step
from services.model.domain.result import OperationResult
from twinkle.data_format import StepResult

SNAPSHOTS_KEPT = 2
"""The newest snapshots that a restore may begin from: a damaged one costs a longer replay, not the adapter."""


@dataclass(frozen=True)
class Retention:
    """What is kept; all else may be dropped."""

    steps: tuple[int, ...]
    """Operations that applied a step and can be undone, in order."""
    snapshots: frozenset[int]
    """Snapshots, by their operation's number."""
    ranges: tuple[tuple[int, int | None], ...]
    """Operations to replay: those above the first number and, where there is a second, below that."""

    def is_replayable(self, number: int) -> bool:
        """Say whether the payload of an operation is kept."""
        return any(low < number and (high is None or number < high) for low, high in self.ranges)


def retain(steps: Sequence[int], snapshots: Sequence[int], *, undo_steps: int) -> Retention:
    """Return what is to be kept.

    The state before a step is the newest snapshot before it and the operations between the two. A step
    whose snapshot is gone can no longer be undone.

    Args:
        steps: operations that applied a step and were not undone, in order.
        snapshots: numbers that a restore can begin from, ascending; 0 is the adapter as it was made.
        undo_steps: most steps that can be undone.
    """
    last = steps[-undo_steps:] if undo_steps else ()
    bases = {step: max((number for number in snapshots if number < step), default=-1) for step in last}
    kept = tuple(step for step in last if bases[step] >= 0)
    roots = snapshots[-SNAPSHOTS_KEPT:]
    ranges = [(bases[step], step) for step in kept] + [(number, None) for number in roots[:1]]
    return Retention(kept, frozenset([*roots, *(bases[step] for step in kept)]), tuple(ranges))


class ReplayKind(IntEnum):
    """How a restore passes an operation."""

    REPLAYED = 1
    """It is run again."""
    PASSED_OVER = 2
    """It changed nothing in the engine."""
    BARRIER = 3
    """It changed the state by other than replay: a restore begins after it."""


def is_applied_step(operation: Operation, outcome: OperationResult | DomainError) -> bool:
    """Say whether an operation moved the weights by an optimizer step."""
    if not isinstance(operation.verb, Step | ClipGradAndStep) or isinstance(outcome, DomainError):
        return False
    return isinstance(outcome.outcome, StepResult) and outcome.outcome.is_applied
