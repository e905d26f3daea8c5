"""Look operations up, and wait for them."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto

from services.kit.caller import Caller
from services.kit.errors import DomainError
from services.model.application.directory import AdapterDirectory
from services.model.application.execute_operation import ExecuteOperation
from services.model.domain.result import OperationResult
from services.model.domain.sequence import Entry


class OperationState(Enum):
    """How far an operation is."""

    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(frozen=True)
class OperationRecord:
    """An operation as the record has it."""

    state: OperationState
    result: OperationResult | None
    error: DomainError | None

    @classmethod
    def of(cls, entry: Entry) -> 'OperationRecord':
        """Return the record of an entry."""
        if entry.is_running:
            return cls(OperationState.RUNNING, None, None)
        state = OperationState.DONE if entry.error is None else OperationState.FAILED
        return cls(state, entry.result, entry.error)


class FindOperation:
    """Answers from the record of an adapter's queue."""

    def __init__(self, directory: AdapterDirectory, execute: ExecuteOperation) -> None:
        """Use the parts given."""
        self._directory = directory
        self._execute = execute

    async def __call__(
        self, caller: Caller, adapter_id: str, sequence_number: int, *, patience: timedelta = timedelta()
    ) -> OperationRecord:
        """Return the record, once the operation is done or `patience` is over.

        Raises:
            AdapterNotFound: no such adapter of the caller.
            OperationNotFound: the operation was not accepted yet, or is no longer on record.
        """
        self._directory.get(caller, adapter_id)
        queue = self._execute.queue_of(adapter_id)
        try:
            async with asyncio.timeout(patience.total_seconds()):
                while queue.sequence.entry(sequence_number).is_running:
                    await queue.wait_for_change()
        except TimeoutError:
            # The time is up, not the operation: it is told as it stands.
            pass
        return OperationRecord.of(queue.sequence.entry(sequence_number))
