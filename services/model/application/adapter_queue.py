"""One adapter's queue: operations wait for their number, run once, and repeats get the record."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from services.kit.errors import AdapterNotFound, Code, DomainError, Internal
from services.model.domain.errors import SequenceGap
from services.model.domain.operation import Operation
from services.model.domain.result import OperationResult
from services.model.domain.sequence import OperationSequence, Turn

_FREEING_CODES = {
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.ALREADY_EXISTS,
    Code.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE,
}
"""Codes of refusals: nothing changed, so the number may be used again."""


class AdapterQueue:
    """Carries out operations of one adapter strictly in order, each exactly once.

    Concurrency: for one event loop. A caller that goes away while its operation waits takes it back;
    one that goes away while it runs does not stop it, and finds the outcome on record.
    """

    def __init__(self, adapter_id: str, *, gap_seconds: float, on_failed: Callable[[int], None]) -> None:
        """Begin before operation 1.

        Args:
            adapter_id: the adapter.
            gap_seconds: how long an operation waits for an earlier number while nothing runs.
            on_failed: told each number that an operation used up without a result.
        """
        self._adapter_id = adapter_id
        self._gap_seconds = gap_seconds
        self._on_failed = on_failed
        self.sequence = OperationSequence(adapter_id)
        self._changed = asyncio.Event()
        self._running: asyncio.Task[OperationResult] | None = None
        self._is_closed = False

    async def carry_out(self, operation: Operation, run: Callable[[], Awaitable[OperationResult]]) -> OperationResult:
        """Return the operation's result: of `run`, or from the record.

        Raises:
            SequenceReused, SequenceGap, OperationNotFound: the number is wrong.
            DomainError: what `run` raised, now or when the operation first ran.
        """
        if await self._wait_for_turn(operation) is Turn.REPEAT:
            return self._recorded(operation.sequence_number)
        self.sequence.begin(operation)
        self._running = asyncio.create_task(self._run(operation, run), name=f'operation-{self._adapter_id}')
        # If the caller goes away, nobody awaits the task; its outcome is on record all the same.
        self._running.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        """Let the operation that runs end; those that wait find the adapter gone."""
        self._is_closed = True
        self._tell()
        if self._running is not None:
            await asyncio.wait([self._running])

    async def wait_for_change(self) -> None:
        """Return when an operation next ends."""
        await self._changed.wait()

    async def _wait_for_turn(self, operation: Operation) -> Turn:
        while not self._is_closed:
            turn = self.sequence.turn(operation)
            is_running = self._running is not None and not self._running.done()
            if turn is Turn.RUN or (turn is Turn.REPEAT and not self._is_unsettled(operation.sequence_number)):
                return turn
            try:
                async with asyncio.timeout(None if is_running else self._gap_seconds):
                    await self._changed.wait()
            except TimeoutError as error:
                expected = self.sequence.last_number + 1
                raise SequenceGap(self._adapter_id, operation.sequence_number, expected) from error
        raise AdapterNotFound(self._adapter_id)

    def _is_unsettled(self, number: int) -> bool:
        return self.sequence.entry(number).is_running

    def _recorded(self, number: int) -> OperationResult:
        entry = self.sequence.entry(number)
        if entry.error is not None:
            raise entry.error
        assert entry.result is not None  # noqa: S101 - settled entries have one of the two
        return replace(entry.result, is_replayed=True)

    async def _run(self, operation: Operation, run: Callable[[], Awaitable[OperationResult]]) -> OperationResult:
        outcome: OperationResult | DomainError = Internal('')
        try:
            outcome = await run()
        except DomainError as error:
            outcome = error
            raise
        else:
            return outcome
        finally:
            self._settle(operation.sequence_number, outcome)

    def _settle(self, number: int, outcome: OperationResult | DomainError) -> None:
        if isinstance(outcome, DomainError) and outcome.code in _FREEING_CODES:
            self.sequence.give_back(number)
        else:
            self.sequence.finish(number, outcome)
            if isinstance(outcome, DomainError):
                self._on_failed(number)
        self._running = None
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
