"""Decides the order of one adapter's operations, and stores their outcomes for repeats.

`application.adapter_queue` runs the operations.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from twinkle.data_format import ForwardResult
from twinkle_services.kit.errors import Code, Disposition, DomainError
from twinkle_services.model.domain.errors import OperationNotFound, SequenceReused
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.domain.result import OperationResult

RECORD_LENGTH = 64
"""Maximum number of results stored for repeats. A client has at most one request per number in progress and retries
immediately, so it repeats only one of its last few numbers."""
RECORD_BYTES = 4 << 20
"""Maximum bytes of the arrays in the stored results, about a million log-probabilities. The newest result is always
stored."""

_UNAPPLIED = {Code.CANCELLED, Code.UNAVAILABLE}
"""Codes of operations that were cancelled or that another service could not process; nothing was applied."""


class Action(Enum):
    """Decision about an operation."""

    RUN = auto()
    """Run the operation, because it is the next one."""
    WAIT = auto()
    """Wait, because an earlier operation is missing or running, or because a different operation with this number is
    running."""
    REPEAT = auto()
    """Return the recorded outcome, or wait for it, because the operation was accepted before."""


class Recorded(Protocol):
    """An operation read from the record, such as `twinkle_services.model.domain.journal.RecordEntry`."""

    @property
    def sequence_number(self) -> int:
        """Number of the operation."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of the operation's content."""
        ...

    @property
    def outcome(self) -> OperationResult | DomainError | None:
        """Outcome of the operation; None if it is not known yet."""
        ...


@dataclass
class Entry:
    """An accepted operation; it is running while it has neither result nor error."""

    fingerprint: str
    result: OperationResult | None = None
    error: DomainError | None = None

    @property
    def is_running(self) -> bool:
        """Whether the operation has no outcome yet."""
        return self.result is None and self.error is None

    @property
    def size_bytes(self) -> int:
        """Size of the arrays in the result."""
        outcome = None if self.result is None else self.result.outcome
        if not isinstance(outcome, ForwardResult):
            return 0
        return sum(array.nbytes for array in (*outcome.logps, *outcome.values, *outcome.routed_experts))


class OperationSequence:
    """Sequence numbers of one adapter, and the outcomes of its last operations."""

    def __init__(self, adapter_id: str) -> None:
        self._adapter_id = adapter_id
        self._record: OrderedDict[int, Entry] = OrderedDict()
        self._size_bytes = 0
        self.last_number = 0
        """Number of the last accepted operation."""

    @classmethod
    def restored(cls, adapter_id: str, entries: Sequence[Recorded], last_number: int) -> 'OperationSequence':
        """Restore the sequence from the record.

        Args:
            adapter_id: Id of the adapter.
            entries: The last operations, in order.
            last_number: Number of the last accepted operation, even if it is no longer among the entries.
        """
        sequence = cls(adapter_id)
        for entry in entries:
            # An operation without an outcome is omitted, because its result cannot be returned to a repeat.
            if entry.outcome is not None:
                sequence._record[entry.sequence_number] = Entry(entry.fingerprint)
                sequence.finish(entry.sequence_number, entry.outcome)
        sequence.last_number = last_number
        return sequence

    @property
    def is_running(self) -> bool:
        """Whether the last operation has no outcome yet."""
        last = self._record.get(self.last_number)
        return last is not None and last.is_running

    def action_for(self, operation: Operation) -> Action:
        """Return the action to take for `operation` now.

        If a running operation with different content has the same number, the new one waits: the running one may be a
        late copy of a refused operation, and its refusal frees the number.

        Raises:
            SequenceReused: The operation's number was used with different content.
            OperationNotFound: The operation ran, but its outcome is no longer on record.
        """
        number = operation.sequence_number
        if number > self.last_number:
            is_next = number == self.last_number + 1 and not self.is_running
            return Action.RUN if is_next else Action.WAIT
        entry = self.entry(number)
        if entry.fingerprint == operation.fingerprint:
            return Action.REPEAT
        if entry.is_running:
            return Action.WAIT
        raise SequenceReused(self._adapter_id, number)

    def begin(self, operation: Operation) -> None:
        """Accept an operation, which uses up its number."""
        self.last_number = operation.sequence_number
        self._record[operation.sequence_number] = Entry(operation.fingerprint)
        self._trim()

    def finish(self, number: int, outcome: OperationResult | DomainError) -> None:
        """Record the outcome of an operation."""
        entry = self._record[number]
        if isinstance(outcome, DomainError):
            entry.error = outcome
        else:
            entry.result = outcome
        self._size_bytes += entry.size_bytes
        self._trim()

    def free_number(self, number: int) -> None:
        """Free the number of the last operation, which was refused before anything changed."""
        del self._record[number]
        self.last_number = number - 1

    def entry(self, number: int) -> Entry:
        """Return the record of an operation.

        Raises:
            OperationNotFound: The operation is not on record.
        """
        entry = self._record.get(number)
        if entry is None:
            raise OperationNotFound(self._adapter_id, number)
        return entry

    def _trim(self) -> None:
        while len(self._record) > RECORD_LENGTH or (len(self._record) > 1 and self._size_bytes > RECORD_BYTES):
            _, entry = self._record.popitem(last=False)
            self._size_bytes -= entry.size_bytes


def is_refusal(error: object) -> bool:
    """Return whether `error` means that nothing changed, so that the operation's number can be used again."""
    return isinstance(error, DomainError) and (error.disposition.frees_number or error.code in _UNAPPLIED)


def outcome_disposition(error: DomainError) -> Disposition:
    """Return the disposition that a caller may assume for an operation that failed with `error`."""
    if not is_refusal(error):
        return Disposition.FAILED
    return Disposition.RETRYABLE if error.disposition.is_transient else Disposition.REFUSED
