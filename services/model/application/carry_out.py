"""Runs one operation exactly once, when it is the next operation of its adapter.

A compute verb is written to the journal while it runs, because replay can repeat it. Its result is returned once the
verb has run and is durable in the journal. For some time after a crash, the verb is written first, because attempts are
counted only for operations on record. A state verb, which needs more than the engine, is journaled together with its
outcome after it has run, because repeating it is harmless. Only its attempts are counted beforehand.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError, Internal
from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.telemetry import spans
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.fetch_batch import FetchBatch
from twinkle_services.model.application.progress import adapter_after, result_of
from twinkle_services.model.application.residency import Residency
from twinkle_services.model.application.resident import Resident
from twinkle_services.model.application.state_verbs import StateChange, StateVerbRunner
from twinkle_services.model.application.waits import Waits
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import VerbRun
from twinkle_services.model.domain.errors import BatchTooLarge, OperationCrashed
from twinkle_services.model.domain.operation import Backward, Forward, Operation, StateVerb, token_count
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.domain.sequence import is_refusal
from twinkle_services.model.ports import Ports

Compute = Callable[[Adapter, Operation], Awaitable[VerbRun]]
"""Runs a compute verb on the engine once it is scheduled."""


@dataclass(frozen=True)
class _Execution:
    """An operation in execution."""

    adapter: Adapter
    operation: Operation
    resident: Resident
    queue_time: timedelta

    def adapter_after(self, run: VerbRun | None, *, now: datetime) -> Adapter:
        """Return the adapter after the operation; see `progress.adapter_after`."""
        return adapter_after(self.adapter, self.operation, run, now=now, queue_time=self.queue_time)


class CarryOut:
    """Runs operations with the engine, the journal and the stores."""

    def __init__(
        self,
        ports: Ports,
        directory: AdapterDirectory,
        residency: Residency,
        run_state_verb: StateVerbRunner,
        *,
        compute: Compute,
        fetch_batch: FetchBatch,
    ) -> None:
        self.waits = Waits()
        """Waits of operations for their batches and for memory."""
        self._directory = directory
        self._residency = residency
        self._journal = ports.journal
        self._run_state_verb = run_state_verb
        self._compute = compute
        self._fetch_batch = fetch_batch
        self._clock = ports.clock

    async def __call__(self, caller: Caller, operation: Operation, *, arrival: float) -> OperationResult:
        """Return the operation's result once it is durable.

        Raises:
            AdapterNotFound: The adapter was deleted while the operation waited.
            Cancelled, Draining: The operation was cancelled, or the service stopped, while the operation waited for
                its batch or for memory.
            JournalUnavailable: The operation could not be made durable; it was not applied.
            DomainError: The batch or the adapter could not be loaded, or the verb failed. The error is recorded, unless
                the operation changed nothing and its number can be used again.
        """
        known = self._directory.get(caller, operation.adapter_id)
        async with AsyncExitStack() as stack:
            async with self._number_used_on_failure(known, operation):
                with self.waits.cancellable(operation.adapter_id):
                    operation = await self._fetch_batch(stack, caller, operation)
                    resident = await stack.enter_async_context(self._residency.hold(operation.adapter_id))
            reach('operation.begun')
            # Loading the adapter may have recorded outcomes, which changed it.
            adapter = self._directory.get(caller, operation.adapter_id)
            queue_time = timedelta(seconds=max(self._clock.monotonic() - arrival, 0.0))
            execution = _Execution(adapter, operation, resident, queue_time)
            if isinstance(operation.verb, StateVerb):
                result = await self._run_and_settle(execution, operation.verb)
            else:
                result = await self._compute_and_record(execution)
        reach('operation.answered')
        return result

    @asynccontextmanager
    async def _number_used_on_failure(self, adapter: Adapter, operation: Operation) -> AsyncIterator[None]:
        """Record the number as used if the block fails because the adapter or the batch cannot be loaded.

        If the number were used up in memory only, the next operation would leave a gap in the journal, and the adapter
        could not be restored.
        """
        outcome: DomainError | None = Internal('')
        try:
            yield
            outcome = None
        except DomainError as error:
            outcome = None if is_refusal(error) else error
            raise
        except asyncio.CancelledError:
            outcome = None
            raise
        finally:
            if outcome is not None:
                # The adapter may have been parked or saved while the batch was fetched.
                current = self._directory.find(adapter.adapter_id) or adapter
                await self._consume_number(current, operation, outcome)

    async def _compute_and_record(self, execution: _Execution) -> OperationResult:
        accepting = asyncio.ensure_future(self._accept(execution.operation))
        if self._residency.attempts.is_careful:
            await asyncio.wait({accepting})
        outcome: VerbRun | DomainError | None = Internal('')
        try:
            outcome = run = await self._compute(execution.adapter, execution.operation)
        except DomainError as error:
            outcome = error
            raise
        except asyncio.CancelledError:
            # The process is shutting down. The next one computes the outcome by replay.
            outcome = None
            raise
        finally:
            # A defect is also recorded, because the operation's number must remain used up after a crash.
            if outcome is not None:
                await self._wait_until_accepted(execution, accepting)
                await self._record(execution, outcome)
        return result_of(execution.operation, run, queue_time=execution.queue_time)

    async def _accept(self, operation: Operation) -> None:
        with spans.span('journal write', size_bytes=operation.request_bytes):
            await self._journal.accept(operation)

    async def _wait_until_accepted(self, execution: _Execution, accepting: Awaitable[None]) -> None:
        reach('operation.computed')
        is_durable = False
        try:
            await accepting
            is_durable = True
        finally:
            if not is_durable:
                # The engine has run an operation that the journal lacks, so the next use restores the adapter.
                await self._residency.discard(execution.operation.adapter_id)

    async def _record(self, execution: _Execution, outcome: VerbRun | DomainError) -> None:
        operation, resident = execution.operation, execution.resident
        if is_refusal(outcome):
            await self._discard_if_partly_changed(execution, outcome)
            await self._journal.revoke(operation)
            return
        if isinstance(outcome, Internal):
            await self._skip(execution, outcome)
            return
        if isinstance(outcome, DomainError):
            run, result = None, outcome
        else:
            run, result = outcome, result_of(operation, outcome, queue_time=execution.queue_time)
        adapter = execution.adapter_after(run, now=self._clock.now())
        self._journal.note(adapter, operation, result)
        self._directory.refresh(adapter)
        # Take a snapshot immediately if a replay might not be bitwise equal.
        resident.count_operation(0.0 if run is None else math.inf if run.is_divided else run.device_seconds)
        if isinstance(operation.verb, Forward | Backward):
            resident.is_pending = isinstance(operation.verb, Forward)

    async def _skip(self, execution: _Execution, outcome: DomainError) -> None:
        """Record the number of a failed operation as used; replay skips the operation."""
        if isinstance(outcome, Internal):
            # A defect leaves the engine's state undefined.
            await self._residency.discard(execution.operation.adapter_id)
        await self._consume_number(execution.adapter, execution.operation, outcome)

    async def _consume_number(self, adapter: Adapter, operation: Operation, outcome: DomainError) -> None:
        updated = adapter_after(adapter, operation, None, now=self._clock.now())
        await self._journal.settle(updated, operation, outcome)
        self._directory.refresh(updated)

    async def _discard_if_partly_changed(
        self, execution: _Execution, outcome: VerbRun | StateChange | DomainError
    ) -> None:
        """Drop the adapter's state in the engine if memory ran out during a verb that changes this state in place."""
        is_in_place = not token_count(execution.operation.verb)
        if isinstance(outcome, BatchTooLarge) and is_in_place:
            await self._residency.discard(execution.operation.adapter_id)

    async def _run_and_settle(self, execution: _Execution, verb: StateVerb) -> OperationResult:
        outcome: StateChange | DomainError | None = Internal('')
        try:
            async with self._attempted(execution.operation):
                outcome = change = await self._run_state_verb(execution.adapter, execution.operation, verb)
        except DomainError as error:
            outcome = error
            raise
        except asyncio.CancelledError:
            outcome = None
            raise
        finally:
            reach('state_verb.done')
            if outcome is not None:
                await self._settle(execution, outcome)
        return result_of(execution.operation, change.run, queue_time=execution.queue_time)

    def _attempted(self, operation: Operation) -> AbstractAsyncContextManager[None]:
        """Return a context that counts an attempt at a state verb, and refuses the verb after several crashes."""
        work = f'{operation.verb_name} of {operation.adapter_id}'
        refusal = OperationCrashed(operation.adapter_id, operation.sequence_number)
        return self._residency.attempts.counted(work, refusal=refusal)

    async def _settle(self, execution: _Execution, outcome: StateChange | DomainError) -> None:
        if is_refusal(outcome):
            await self._discard_if_partly_changed(execution, outcome)
            return
        if isinstance(outcome, DomainError):
            await self._skip(execution, outcome)
            return
        operation = execution.operation
        adapter = execution.adapter_after(outcome.run, now=self._clock.now())
        if outcome.version is not None:
            adapter = replace(adapter, version=outcome.version)
        result = result_of(operation, outcome.run, queue_time=execution.queue_time)
        is_durable = False
        try:
            with spans.span('journal write'):
                await self._journal.settle(
                    adapter, operation, result, state=outcome.state, undone_from=outcome.undone_from
                )
            is_durable = True
        finally:
            if not is_durable and outcome.state is not None:
                await self._residency.discard(operation.adapter_id)
        self._directory.refresh(adapter)
        if outcome.state is not None:
            execution.resident.mark_snapshotted()
            execution.resident.is_pending = False
