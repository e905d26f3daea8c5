"""The order of one adapter's operations, and the record that answers repeats.

Pure: it decides, and never waits or runs anything. `application.adapter_queue` asks it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from services.kit.errors import DomainError
from services.model.domain.errors import OperationNotFound, SequenceReused
from services.model.domain.operation import Operation
from services.model.domain.result import OperationResult
from twinkle.data_format import ForwardResult

RECORD_LENGTH = 64
"""Results kept for repeats. A client has at most one request of a number under way and retries at once, so a
repeat comes within a few numbers."""
RECORD_BYTES = 4 << 20
"""Log-probabilities kept with them: a million. The newest result is kept whatever its size."""


class Action(Enum):
    """What is to become of an operation now."""

    RUN = auto()
    """It is the next one."""
    WAIT = auto()
    """An earlier number is missing or runs."""
    REPEAT = auto()
    """It was accepted before: answer from the record, or when it is done."""


class Recorded(Protocol):
    """An operation as it was kept, such as `services.model.ports.RecordEntry`."""

    @property
    def sequence_number(self) -> int:
        """The operation."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of its content."""
        ...

    @property
    def outcome(self) -> OperationResult | DomainError | None:
        """What came of it; None where that is still to be found."""
        ...


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

    @property
    def size_bytes(self) -> int:
        """Of its log-probabilities and values."""
        outcome = None if self.result is None else self.result.outcome
        if not isinstance(outcome, ForwardResult):
            return 0
        return sum(array.nbytes for array in (*outcome.logps, *outcome.values))


class OperationSequence:
    """Numbers of one adapter's operations: which is next, which ran, with what outcome."""

    def __init__(self, adapter_id: str) -> None:
        """Begin before operation 1."""
        self._adapter_id = adapter_id
        self._record: OrderedDict[int, Entry] = OrderedDict()
        self._size_bytes = 0
        self.last_number = 0
        """The last operation accepted; the next one is this plus 1."""

    @classmethod
    def restored(cls, adapter_id: str, entries: Sequence[Recorded], last_number: int) -> 'OperationSequence':
        """Return the sequence as it was.

        Args:
            adapter_id: the adapter.
            entries: the last operations, in order.
            last_number: the last operation accepted, also where it is not among the entries any more.
        """
        sequence = cls(adapter_id)
        for entry in entries:
            sequence._record[entry.sequence_number] = Entry(entry.fingerprint)
            if entry.outcome is not None:
                sequence.finish(entry.sequence_number, entry.outcome)
        sequence.last_number = last_number
        return sequence

    @property
    def is_running(self) -> bool:
        """Whether the last operation's outcome is still to come."""
        last = self._record.get(self.last_number)
        return last is not None and last.is_running

    def action_for(self, operation: Operation) -> Action:
        """Say what is to become of `operation` now.

        Raises:
            SequenceReused: its number was used for other content.
            OperationNotFound: it ran so long ago that its outcome is no longer on record.
        """
        number = operation.sequence_number
        if number > self.last_number:
            is_next = number == self.last_number + 1 and not self.is_running
            return Action.RUN if is_next else Action.WAIT
        entry = self.entry(number)
        if entry.fingerprint != operation.fingerprint:
            raise SequenceReused(self._adapter_id, number)
        return Action.REPEAT

    def begin(self, operation: Operation) -> None:
        """Use up the number of the operation that runs now."""
        self.last_number = operation.sequence_number
        self._record[operation.sequence_number] = Entry(operation.fingerprint)
        self._shorten()

    def finish(self, number: int, outcome: OperationResult | DomainError) -> None:
        """Record the outcome of an operation."""
        entry = self._record[number]
        if isinstance(outcome, DomainError):
            entry.error = outcome
        else:
            entry.result = outcome
        self._size_bytes += entry.size_bytes
        self._shorten()

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

    def _shorten(self) -> None:
        while len(self._record) > RECORD_LENGTH or (len(self._record) > 1 and self._size_bytes > RECORD_BYTES):
            _, entry = self._record.popitem(last=False)
            self._size_bytes -= entry.size_bytes
