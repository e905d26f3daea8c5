"""Carry out one operation whose execution it is, exactly once.

What the engine alone does is written down while it computes, and answered once both are done; replay
gives it again. What needs more is done first, harmlessly if repeated, and then settled.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from services.kit.caller import Caller
from services.kit.errors import DomainError, Internal
from services.kit.failpoints import reach
from services.model.application.directory import AdapterDirectory
from services.model.application.fetch_batch import FetchBatch
from services.model.application.progress import adapter_after, result_of
from services.model.application.residency import Residency
from services.model.application.resident import Resident
from services.model.application.state_verbs import StateChange, StateVerbs
from services.model.domain.adapter import Adapter
from services.model.domain.engine import VerbRun
from services.model.domain.errors import BatchTooLarge
from services.model.domain.operation import Backward, Forward, Operation, StateVerb, token_count
from services.model.domain.refusal import is_refusal
from services.model.domain.result import OperationResult
from services.model.ports import Ports

Compute = Callable[[Adapter, Operation], Awaitable[VerbRun]]
"""Runs a compute verb on the engine when its time has come."""


@dataclass(frozen=True)
class _Execution:
    """An operation that runs now."""

    adapter: Adapter
    operation: Operation
    resident: Resident
    queue_time: timedelta


class CarryOut:
    """Runs operations against engine, journal and stores."""

    def __init__(
        self,
        ports: Ports,
        directory: AdapterDirectory,
        residency: Residency,
        state_verbs: StateVerbs,
        *,
        compute: Compute,
        fetch_batch: FetchBatch,
    ) -> None:
        """Use the parts given."""
        self._directory = directory
        self._residency = residency
        self._journal = ports.journal
        self._state_verbs = state_verbs
        self._compute = compute
        self._fetch_batch = fetch_batch
        self._clock = ports.clock

    async def __call__(self, caller: Caller, operation: Operation, *, arrival: float) -> OperationResult:
        """Return the operation's result, durable.

        Raises:
            AdapterNotFound: the adapter was deleted while the operation waited.
            JournalUnavailable: it could not be made durable; it was not applied.
            DomainError: whatever the verb raised; recorded, unless nothing changed and the number is free.
        """
        known = self._directory.get(caller, operation.adapter_id)
        async with AsyncExitStack() as stack:
            async with self._using_up(known, operation):
                operation = await self._fetch_batch(stack, caller, operation)
                resident = await stack.enter_async_context(self._residency.hold(operation.adapter_id))
            reach('operation.begun')
            # Looked up again: making it resident may have found outcomes.
            adapter = self._directory.get(caller, operation.adapter_id)
            queue_time = timedelta(seconds=max(self._clock.monotonic() - arrival, 0.0))
            execution = _Execution(adapter, operation, resident, queue_time)
            if isinstance(operation.verb, StateVerb):
                result = await self._settled(execution, operation.verb)
            else:
                result = await self._computed(execution)
        reach('operation.answered')
        return result

    @asynccontextmanager
    async def _using_up(self, adapter: Adapter, operation: Operation) -> AsyncIterator[None]:
        """Use up the number, durably, where the block fails: the adapter cannot be made again, or there is no batch.

        Were it used up here alone, the next operation would leave a gap in the journal that no restore can pass.
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
                # As it is by now: it may have been parked, or saved, while its batch was on the way.
                current = self._directory.find(adapter.adapter_id) or adapter
                await self._use_up(current, operation, outcome)

    # Compute verbs: written down while they run

    async def _computed(self, execution: _Execution) -> OperationResult:
        accepting = asyncio.ensure_future(self._journal.accept(execution.operation))
        outcome: VerbRun | DomainError | None = Internal('')
        try:
            outcome = run = await self._compute(execution.adapter, execution.operation)
        except DomainError as error:
            outcome = error
            raise
        except asyncio.CancelledError:
            # The process ends: replay will give the outcome.
            outcome = None
            raise
        finally:
            # Also after a defect: its number is used up, which has to outlive a crash.
            if outcome is not None:
                await self._accepted(execution, accepting)
                await self._record(execution, outcome)
        return result_of(execution.operation, run, queue_time=execution.queue_time)

    async def _accepted(self, execution: _Execution, accepting: Awaitable[None]) -> None:
        reach('operation.computed')
        is_durable = False
        try:
            await accepting
            is_durable = True
        finally:
            if not is_durable:
                # The engine is ahead of what is durable: what is durable counts.
                await self._residency.discard(execution.operation.adapter_id)

    async def _record(self, execution: _Execution, outcome: VerbRun | DomainError) -> None:
        operation, resident = execution.operation, execution.resident
        if is_refusal(outcome):
            await self._discard_if_torn(execution, outcome)
            await self._journal.revoke(operation)
            return
        if isinstance(outcome, Internal):
            await self._pass_over(execution, outcome)
            return
        run = None if isinstance(outcome, DomainError) else outcome
        adapter = adapter_after(execution.adapter, operation, run, now=self._clock.now())
        self._journal.note(adapter, operation, self._noted(execution, outcome))
        self._directory.refresh(adapter)
        # What replay may not give again to the bit is snapshotted at once.
        resident.count_operation(0.0 if run is None else math.inf if run.is_divided else run.device_seconds)
        if isinstance(operation.verb, Forward | Backward):
            resident.is_pending = isinstance(operation.verb, Forward)

    def _noted(self, execution: _Execution, outcome: VerbRun | DomainError) -> OperationResult | DomainError:
        if isinstance(outcome, DomainError):
            return outcome
        return result_of(execution.operation, outcome, queue_time=execution.queue_time)

    async def _pass_over(self, execution: _Execution, outcome: DomainError) -> None:
        """Use up the number of an operation that counts for nothing, and that replay must not run."""
        if isinstance(outcome, Internal):
            # Nobody knows what a defect left behind.
            await self._residency.discard(execution.operation.adapter_id)
        await self._use_up(execution.adapter, execution.operation, outcome)

    async def _use_up(self, adapter: Adapter, operation: Operation, outcome: DomainError) -> None:
        passed = adapter_after(adapter, operation, None, now=self._clock.now())
        await self._journal.settle(passed, operation, outcome)
        self._directory.refresh(passed)

    async def _discard_if_torn(self, execution: _Execution, outcome: VerbRun | StateChange | DomainError) -> None:
        """Let replay make the adapter again where memory ran out in the middle of a verb that changes it in place."""
        is_in_place = not token_count(execution.operation.verb)
        if isinstance(outcome, BatchTooLarge) and is_in_place:
            await self._residency.discard(execution.operation.adapter_id)

    # State verbs: done, then settled

    async def _settled(self, execution: _Execution, verb: StateVerb) -> OperationResult:
        outcome: StateChange | DomainError | None = Internal('')
        try:
            outcome = change = await self._state_verbs(execution.adapter, execution.operation, verb)
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

    async def _settle(self, execution: _Execution, outcome: StateChange | DomainError) -> None:
        if is_refusal(outcome):
            await self._discard_if_torn(execution, outcome)
            return
        if isinstance(outcome, DomainError):
            await self._pass_over(execution, outcome)
            return
        operation = execution.operation
        adapter = adapter_after(execution.adapter, operation, outcome.run, now=self._clock.now())
        if outcome.version is not None:
            adapter = replace(adapter, version=outcome.version)
        result = result_of(operation, outcome.run, queue_time=execution.queue_time)
        is_durable = False
        try:
            await self._journal.settle(adapter, operation, result, state=outcome.state, undone_from=outcome.undone_from)
            is_durable = True
        finally:
            if not is_durable and outcome.state is not None:
                await self._residency.discard(operation.adapter_id)
        self._directory.refresh(adapter)
        if outcome.state is not None:
            execution.resident.mark_snapshotted()
            execution.resident.is_pending = False
