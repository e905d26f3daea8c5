"""What the operations of a journal mean to a restore."""

from enum import IntEnum

from services.kit.errors import DomainError
from services.model.domain.operation import ClipGradAndStep, Operation, Step
from services.model.domain.result import OperationResult
from twinkle.data_format import StepResult


class Kind(IntEnum):
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
