"""The order of one adapter's operations, and the record that answers repeats.

Pure: it decides, and never waits or runs anything. `application.adapter_queue` asks it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto

from services.kit.errors import DomainError
from services.model.domain.errors import OperationNotFound, SequenceReused
from services.model.domain.operation import Operation
from services.model.domain.result import OperationResult

RECORD_LENGTH = 64
"""Results kept for repeats. A client has at most one request of a number under way and retries at
once, so a repeat comes within a few numbers; results may hold log-probabilities, so not many are kept."""


class Turn(Enum):
    """What is to become of an operation now."""

    RUN = auto()
    """It is the next one."""
    WAIT = auto()
    """An earlier number is missing or runs."""
    REPEAT = auto()
    """It was accepted before: answer from the record, or when it is done."""


@dataclass
class Entry:
    """An accepted operation: running while both outcomes are None."""

    fingerprint: str
    result: OperationResult | None = None
    error: DomainError | None = None

    @property
    def is_running(self) -> bool:
        """Whether its outcome is still to come."""
        return self.result is None and self.error is None


class OperationSequence:
    """Numbers of one adapter's operations: which is next, which ran, with what outcome."""

    def __init__(self, adapter_id: str) -> None:
        """Begin before operation 1."""
        self._adapter_id = adapter_id
        self._record: OrderedDict[int, Entry] = OrderedDict()
        self.last_number = 0
        """The last operation accepted; the next one is this plus 1."""

    def turn(self, operation: Operation) -> Turn:
        """Say what is to become of `operation` now.

        Raises:
            SequenceReused: its number was used for other content.
            OperationNotFound: it ran so long ago that its outcome is no longer on record.
        """
        number = operation.sequence_number
        if number > self.last_number:
            is_next = number == self.last_number + 1 and not self._is_any_running()
            return Turn.RUN if is_next else Turn.WAIT
        entry = self.entry(number)
        if entry.fingerprint != operation.fingerprint:
            raise SequenceReused(self._adapter_id, number)
        return Turn.REPEAT

    def begin(self, operation: Operation) -> None:
        """Use up the number of the operation that runs now."""
        self.last_number = operation.sequence_number
        self._record[operation.sequence_number] = Entry(operation.fingerprint)
        while len(self._record) > RECORD_LENGTH:
            self._record.popitem(last=False)

    def finish(self, number: int, outcome: OperationResult | DomainError) -> None:
        """Record the outcome of an operation."""
        entry = self._record[number]
        if isinstance(outcome, DomainError):
            entry.error = outcome
        else:
            entry.result = outcome

    def give_back(self, number: int) -> None:
        """Free the number of the last operation, which was refused before anything changed."""
        del self._record[number]
        self.last_number = number - 1

    def entry(self, number: int) -> Entry:
        """Return the record of an operation.

        Raises:
            OperationNotFound: it is not on record.
        """
        entry = self._record.get(number)
        if entry is None:
            raise OperationNotFound(self._adapter_id, number)
        return entry

    def _is_any_running(self) -> bool:
        last = self._record.get(self.last_number)
        return last is not None and last.is_running
