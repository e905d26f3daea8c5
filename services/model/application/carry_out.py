"""Carry out one operation whose turn it is, exactly once.

What the engine alone does is written down while it computes, and answered once both are done; replay
gives it again. What needs more of the world is done first, harmlessly if repeated, and then settled.
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
from services.model.application.fill_batch import FillBatch
from services.model.application.progress import adapter_after, result_of
from services.model.application.residency import Residency
from services.model.application.resident import Resident
from services.model.application.state_verbs import StateChange, StateVerbs
from services.model.application.world import World
from services.model.domain.adapter import Adapter
from services.model.domain.errors import BatchTooLarge
from services.model.domain.operation import Backward, Forward, Operation, StateVerb, token_count
from services.model.domain.refusal import is_refusal
from services.model.domain.result import OperationResult
from services.model.ports import VerbRun

Compute = Callable[[Adapter, Operation], Awaitable[VerbRun]]
"""Runs a compute verb on the engine when its time has come."""


@dataclass(frozen=True)
class _Turn:
    """An operation that runs now."""

    adapter: Adapter
    operation: Operation
    resident: Resident
    queue_time: timedelta


class CarryOut:
    """Runs operations against engine, journal and stores."""

    def __init__(
        self,
        world: World,
        directory: AdapterDirectory,
        residency: Residency,
        state_verbs: StateVerbs,
        *,
        compute: Compute,
        fill_batch: FillBatch,
    ) -> None:
        """Use the parts given."""
        self._directory = directory
        self._residency = residency
        self._journal = world.journal
        self._state_verbs = state_verbs
        self._compute = compute
        self._fill_batch = fill_batch
        self._clock = world.clock

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
                operation = await self._fill_batch(stack, caller, operation)
                resident = await stack.enter_async_context(self._residency.hold(operation.adapter_id))
            reach('operation.begun')
            # Looked up again: making it resident may have found outcomes.
            adapter = self._directory.get(caller, operation.adapter_id)
            queue_time = timedelta(seconds=max(self._clock.monotonic() - arrival, 0.0))
            turn = _Turn(adapter, operation, resident, queue_time)
            if isinstance(operation.verb, StateVerb):
                result = await self._settled(turn, operation.verb)
            else:
                result = await self._computed(turn)
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

    async def _computed(self, turn: _Turn) -> OperationResult:
        accepting = asyncio.ensure_future(self._journal.accept(turn.operation))
        outcome: VerbRun | DomainError | None = Internal('')
        try:
            outcome = run = await self._compute(turn.adapter, turn.operation)
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
                await self._accepted(turn, accepting)
                await self._record(turn, outcome)
        return result_of(turn.operation, run, queue_time=turn.queue_time)

    async def _accepted(self, turn: _Turn, accepting: Awaitable[None]) -> None:
        reach('operation.computed')
        is_durable = False
        try:
            await accepting
            is_durable = True
        finally:
            if not is_durable:
                # The engine is ahead of what is durable: what is durable counts.
                await self._residency.discard(turn.operation.adapter_id)

    async def _record(self, turn: _Turn, outcome: VerbRun | DomainError) -> None:
        operation, resident = turn.operation, turn.resident
        if is_refusal(outcome):
            await self._discard_if_torn(turn, outcome)
            await self._journal.revoke(operation)
            return
        if isinstance(outcome, Internal):
            await self._pass_over(turn, outcome)
            return
        run = None if isinstance(outcome, DomainError) else outcome
        adapter = adapter_after(turn.adapter, operation, run, now=self._clock.now())
        self._journal.note(adapter, operation, self._noted(turn, outcome))
        self._directory.renew(adapter)
        # What replay may not give again to the bit is snapshotted at once.
        resident.ran(0.0 if run is None else math.inf if run.is_divided else run.device_seconds)
        if isinstance(operation.verb, Forward | Backward):
            resident.is_pending = isinstance(operation.verb, Forward)

    def _noted(self, turn: _Turn, outcome: VerbRun | DomainError) -> OperationResult | DomainError:
        if isinstance(outcome, DomainError):
            return outcome
        return result_of(turn.operation, outcome, queue_time=turn.queue_time)

    async def _pass_over(self, turn: _Turn, outcome: DomainError) -> None:
        """Use up the number of an operation that counts for nothing, and that replay must not run."""
        if isinstance(outcome, Internal):
            # Nobody knows what a defect left behind.
            await self._residency.discard(turn.operation.adapter_id)
        await self._use_up(turn.adapter, turn.operation, outcome)

    async def _use_up(self, adapter: Adapter, operation: Operation, outcome: DomainError) -> None:
        passed = adapter_after(adapter, operation, None, now=self._clock.now())
        await self._journal.settle(passed, operation, outcome)
        self._directory.renew(passed)

    async def _discard_if_torn(self, turn: _Turn, outcome: VerbRun | StateChange | DomainError) -> None:
        """Let replay make the adapter again where memory ran out in the middle of a verb that changes it in place."""
        is_in_place = not token_count(turn.operation.verb)
        if isinstance(outcome, BatchTooLarge) and is_in_place:
            await self._residency.discard(turn.operation.adapter_id)

    # State verbs: done, then settled

    async def _settled(self, turn: _Turn, verb: StateVerb) -> OperationResult:
        outcome: StateChange | DomainError | None = Internal('')
        try:
            outcome = change = await self._state_verbs(turn.adapter, turn.operation, verb)
        except DomainError as error:
            outcome = error
            raise
        except asyncio.CancelledError:
            outcome = None
            raise
        finally:
            reach('state_verb.done')
            if outcome is not None:
                await self._settle(turn, outcome)
        return result_of(turn.operation, change.run, queue_time=turn.queue_time)

    async def _settle(self, turn: _Turn, outcome: StateChange | DomainError) -> None:
        if is_refusal(outcome):
            await self._discard_if_torn(turn, outcome)
            return
        if isinstance(outcome, DomainError):
            await self._pass_over(turn, outcome)
            return
        operation = turn.operation
        adapter = adapter_after(turn.adapter, operation, outcome.run, now=self._clock.now())
        if outcome.version is not None:
            adapter = replace(adapter, version=outcome.version)
        result = result_of(operation, outcome.run, queue_time=turn.queue_time)
        is_durable = False
        try:
            await self._journal.settle(adapter, operation, result, state=outcome.state, undone_from=outcome.undone_from)
            is_durable = True
        finally:
            if not is_durable and outcome.state is not None:
                await self._residency.discard(operation.adapter_id)
        self._directory.renew(adapter)
        if outcome.state is not None:
            turn.resident.snapshotted()
            turn.resident.is_pending = False
