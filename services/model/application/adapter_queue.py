"""The queue of one adapter runs operations in the order of their numbers and returns recorded results for repeats."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from twinkle_services.kit.errors import AdapterNotFound, Cancelled, DomainError, Internal
from twinkle_services.model.application.waits import ChangeNotifier
from twinkle_services.model.domain.errors import SequenceGap
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.domain.sequence import Action, OperationSequence, is_refusal, outcome_disposition


@dataclass(frozen=True, eq=False)
class _Waiter:
    """A caller that waits until its operation may run, or until the same operation of an earlier call has finished."""

    number: int
    start_time: float
    ready: 'asyncio.Future[None]'

    def wake(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def fail(self, error: DomainError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)


class AdapterQueue:
    """Runs the operations of one adapter strictly in order, each exactly once.

    If a caller disconnects while its operation waits, the operation is withdrawn. If it disconnects while the operation
    runs, the operation completes and its outcome is recorded.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self,
        adapter_id: str,
        *,
        gap_seconds: float,
        sequence: OperationSequence | None = None,
    ) -> None:
        """Initialize the queue.

        Args:
            adapter_id: Id of the adapter.
            gap_seconds: Maximum time that an operation waits for a missing earlier number while no operation runs.
            sequence: Operations that have already run; None for a new adapter.
        """
        self._adapter_id = adapter_id
        self._gap_seconds = gap_seconds
        self.sequence = OperationSequence(adapter_id) if sequence is None else sequence
        self._waiters: dict[int, list[_Waiter]] = {}
        self._finished = ChangeNotifier()
        self._running: asyncio.Task[OperationResult] | None = None
        self._idle_since = 0.0
        self._gap_timer: asyncio.TimerHandle | None = None
        self.is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether an operation is running."""
        return self._running is not None

    async def carry_out(self, operation: Operation, run: Callable[[], Awaitable[OperationResult]]) -> OperationResult:
        """Return the result of `run`, or the recorded result if the operation ran before.

        Raises:
            SequenceReused, SequenceGap, OperationNotFound: The sequence number is wrong.
            AdapterNotFound: The queue was closed before the operation ran.
            Cancelled: The operation was cancelled while it waited.
            DomainError: `run` raised it, in this call or when the operation first ran.
        """
        if await self._wait_for_turn(operation) is Action.REPEAT:
            return self._recorded(operation.sequence_number)
        self.sequence.begin(operation)
        self._stop_gap_timer()
        self._running = asyncio.create_task(self._run(operation, run), name=f'operation-{self._adapter_id}')
        # If the caller disconnects, nothing awaits the task, so the callback retrieves its error, which is recorded.
        self._running.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._running)

    def is_urgent(self, operation: Operation) -> bool:
        """Return whether the operation has a recorded outcome, or is the next one and does not wait yet.

        Such an operation is admitted even beyond the limits, because later operations may wait for it.

        Raises:
            SequenceReused, OperationNotFound: The sequence number is wrong.
        """
        number = operation.sequence_number
        if self.sequence.action_for(operation) is Action.REPEAT:
            return not self._is_unsettled(number)
        return number == self.sequence.last_number + 1 and not self.is_waiting(number)

    def is_settled(self, number: int) -> bool:
        """Return whether an operation's outcome is recorded; False while it waits or runs.

        Raises:
            OperationNotFound: The operation was never accepted, or is no longer on record.
        """
        return not self.is_waiting(number) and not self.sequence.entry(number).is_running

    def is_waiting(self, number: int) -> bool:
        """Return whether an operation waits for its turn."""
        return number > self.sequence.last_number and number in self._waiters

    def drop(self, number: int) -> bool:
        """Cancel an operation that waits for its turn; return False if it does not wait."""
        return self._fail(number, Cancelled())

    def drop_all(self) -> None:
        """Cancel all operations that wait for their turn."""
        for number in list(self._waiters):
            self.drop(number)

    def skip(self, number: int, *, missing: int) -> bool:
        """Reject an operation that waits for the number `missing`; return False if it does not wait for that number."""
        is_behind = number > missing > self.sequence.last_number
        return is_behind and self._fail(number, SequenceGap(self._adapter_id, number, missing))

    async def close(self) -> None:
        """Close the queue and wait for the running operation; waiting calls of `carry_out` raise AdapterNotFound."""
        self.is_closed = True
        self._stop_gap_timer()
        for number in list(self._waiters):
            self._wake(number)
        self.notify_watchers()
        if self._running is not None:
            await asyncio.wait([self._running])

    async def wait_for_change(self) -> None:
        """Wait until an operation finishes or is cancelled, the queue closes, or `notify_watchers` is called."""
        await self._finished.wait()

    def notify_watchers(self) -> None:
        """Wake all tasks in `wait_for_change`."""
        self._finished.notify()

    async def _wait_for_turn(self, operation: Operation) -> Action:
        while not self.is_closed:
            action = self.sequence.action_for(operation)
            if action is Action.RUN or (action is Action.REPEAT and not self._is_unsettled(operation.sequence_number)):
                return action
            await self._wait(operation.sequence_number)
        raise AdapterNotFound(self._adapter_id)

    async def _wait(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(number, loop.time(), loop.create_future())
        self._waiters.setdefault(number, []).append(waiter)
        self._watch_gap()
        try:
            await waiter.ready
        except asyncio.CancelledError:
            # Later operations may wait for this number, which may not be sent again.
            self._watch_gap()
            raise
        finally:
            waiters = self._waiters[number]
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[number]

    def _wake(self, number: int) -> None:
        for waiter in self._waiters.get(number, ()):
            waiter.wake()

    def _fail(self, number: int, error: DomainError) -> bool:
        if not self.is_waiting(number):
            return False
        waiters = [waiter for waiter in self._waiters[number] if not waiter.ready.done()]
        for waiter in waiters:
            waiter.fail(error)
        self.notify_watchers()
        return bool(waiters)

    def _watch_gap(self) -> None:
        """Start the timer that limits waiting to `gap_seconds` while no operation runs."""
        if self._running is None and self._gap_timer is None and self._waiters:
            self._gap_timer = asyncio.get_running_loop().call_later(self._gap_seconds, self._refuse_gaps)

    def _refuse_gaps(self) -> None:
        loop, expected = asyncio.get_running_loop(), self.sequence.last_number + 1
        self._gap_timer, next_deadline = None, math.inf
        for waiter in [waiter for waiters in self._waiters.values() for waiter in waiters]:
            deadline = max(waiter.start_time, self._idle_since) + self._gap_seconds
            if deadline <= loop.time():
                waiter.fail(SequenceGap(self._adapter_id, waiter.number, expected))
            else:
                next_deadline = min(next_deadline, deadline)
        if next_deadline < math.inf:
            self._gap_timer = loop.call_at(next_deadline, self._refuse_gaps)

    def _stop_gap_timer(self) -> None:
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None

    def _is_unsettled(self, number: int) -> bool:
        return self.sequence.entry(number).is_running

    def _recorded(self, number: int) -> OperationResult:
        entry = self.sequence.entry(number)
        if entry.error is not None:
            entry.error.disposition = outcome_disposition(entry.error)
            raise entry.error
        assert entry.result is not None  # noqa: S101 - settled entries have a result or an error
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
        if isinstance(outcome, DomainError):
            outcome.disposition = outcome_disposition(outcome)
        if is_refusal(outcome):
            self.sequence.free_number(number)
        else:
            self.sequence.finish(number, outcome)
        self._running = None
        self._idle_since = asyncio.get_running_loop().time()
        self._wake(number)
        self._wake(self.sequence.last_number + 1)
        self.notify_watchers()
        self._watch_gap()
