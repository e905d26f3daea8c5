"""Make an adapter again: its newest snapshot, then the operations after it, replayed.

Recovery after a crash, paging in and undo are this one thing.
"""

from dataclasses import dataclass, replace

import structlog

from services.kit.clock import Clock
from services.kit.errors import AdapterNotFound, DomainError, Internal
from services.kit.failpoints import reach
from services.model.application.progress import adapter_after, result_of
from services.model.domain.adapter import Adapter
from services.model.domain.divergence import first_difference
from services.model.domain.engine import VerbRun
from services.model.domain.errors import AdapterDamaged
from services.model.domain.operation import ComputeVerb, Operation, StateVerb
from services.model.domain.refusal import is_refusal
from services.model.domain.result import OperationResult
from services.model.ports import Journal, JournalEntry, Snapshot, TrainerBackend

_log = structlog.get_logger('restore')
_PROGRESS_EVERY = 100
"""Replayed operations between two lines of the log."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """An adapter that is in the engine again."""

    adapter: Adapter
    snapshot_number: int
    """The operation that the snapshot was taken after."""
    replayed_count: int = 0
    device_seconds: float = 0.0
    """Of the replay."""
    found_count: int = 0
    """Outcomes that were not on record yet."""
    divergence_count: int = 0
    """Outcomes that came out other than on record."""


class _PassedOver(Exception):
    """An operation met a defect, and the journal says so by now: begin again without it."""

    def __init__(self, sequence_number: int) -> None:
        super().__init__(sequence_number)
        self.sequence_number = sequence_number


class Restore:
    """Restores adapters into the engine."""

    def __init__(self, backend: TrainerBackend, journal: Journal, *, clock: Clock) -> None:
        """Use the parts given."""
        self._backend = backend
        self._journal = journal
        self._clock = clock
        self.divergence_count = 0
        """Replayed operations that did not come out as on record, since the service began."""

    async def __call__(self, current: Adapter, *, until: int | None = None) -> Restored:
        """Put the adapter into the engine as it was after operation `until`, or after the last one.

        Outcomes that were never noted are noted; an operation that was refused is struck, and one that met a defect
        is passed over from now on, so that it cannot keep the adapter, or the service, from coming back.

        Args:
            current: the adapter as it is known: versions that were published stay published.
            until: the operation. None for the last one.

        Raises:
            AdapterNotFound, AdapterDamaged: it cannot be made again; it is not in the engine then.
            JournalUnavailable: what was found could not be written down.
        """
        reach('restore.begun')
        adapter_id, is_done, passed_over = current.adapter_id, False, 0
        try:
            restored = None
            while restored is None:
                try:
                    restored = await self._attempt(current, until)
                except _PassedOver as defect:
                    passed_over = defect.sequence_number
            is_done = True
        finally:
            if not is_done:
                await self._backend.delete_adapter(adapter_id)
        if not passed_over:
            return restored
        number = max(restored.adapter.sequence_number, passed_over)
        adapter = replace(restored.adapter, sequence_number=number)
        return replace(restored, adapter=adapter, found_count=restored.found_count + 1)

    async def _attempt(self, current: Adapter, until: int | None) -> Restored:
        snapshot = await self._journal.snapshot_before(current.adapter_id, at_most=until)
        begun = await begin_from(snapshot, self._backend)
        restored = Restored(adapter=replace(begun, version=current.version), snapshot_number=snapshot.sequence_number)
        return await self._replay(restored, current, until)

    async def _replay(self, restored: Restored, current: Adapter, until: int | None) -> Restored:
        adapter_id = current.adapter_id
        entries = await self._journal.entries(adapter_id, after=restored.snapshot_number, until=until)
        for entry in entries:
            reach('restore.replaying')
            restored = await self._replay_one(restored, current, entry)
            if restored.replayed_count % _PROGRESS_EVERY == 0:
                _log.info('replaying', adapter=adapter_id, done=restored.replayed_count, total=len(entries))
        return restored

    async def _replay_one(self, restored: Restored, current: Adapter, entry: JournalEntry) -> Restored:
        operation = entry.operation
        run, outcome = await self._run(operation)
        adapter = adapter_after(restored.adapter, operation, run, now=self._clock.now())
        # Saves are not replayed, so what is known of them counts as long as no step followed.
        is_as_known = adapter.step_count == current.step_count
        adapter = replace(adapter, checkpoint_path=current.checkpoint_path if is_as_known else '')
        if entry.outcome is None and isinstance(outcome, Internal):
            # A defect: it counts for nothing, as when it was met at once, and nobody knows what it left behind.
            await self._journal.settle(adapter, operation, outcome)
            raise _PassedOver(operation.sequence_number)
        if entry.outcome is None and is_refusal(outcome):
            await self._journal.revoke(operation)
            return replace(restored, found_count=restored.found_count + 1)
        if entry.outcome is None:
            self._journal.note(adapter, operation, outcome)
        return replace(
            restored,
            adapter=adapter,
            replayed_count=restored.replayed_count + 1,
            device_seconds=restored.device_seconds + (run.device_seconds if run else 0.0),
            found_count=restored.found_count + (entry.outcome is None),
            divergence_count=restored.divergence_count + self._compare(operation, entry.outcome, outcome),
        )

    async def _run(self, operation: Operation) -> tuple[VerbRun | None, OperationResult | DomainError]:
        try:
            run = await self._backend.run(operation.adapter_id, _compute_verb(operation))
        except AdapterNotFound as error:
            raise AdapterDamaged(operation.adapter_id, 'it left the engine while it was replayed') from error
        except DomainError as error:
            return None, error
        return run, result_of(operation, run)

    def _compare(
        self, operation: Operation, recorded: OperationResult | DomainError | None, found: OperationResult | DomainError
    ) -> int:
        difference = None if recorded is None else first_difference(recorded, found)
        if difference is None:
            return 0
        self.divergence_count += 1
        _log.error(
            'replay diverged',
            adapter=operation.adapter_id,
            operation=operation.sequence_number,
            verb=operation.verb_name,
            difference=difference,
        )
        if isinstance(found, DomainError) and not isinstance(recorded, DomainError):
            raise AdapterDamaged(operation.adapter_id, difference)
        return 1


async def begin_from(snapshot: Snapshot, backend: TrainerBackend) -> Adapter:
    """Put an adapter into an engine as it was at a snapshot, and return it."""
    adapter = snapshot.adapter
    if snapshot.state is not None:
        state = replace(snapshot.state, full_parameters=adapter.full_parameters)
        await backend.restore_adapter(adapter.adapter_id, state)
        return adapter
    await backend.delete_adapter(adapter.adapter_id)
    made = await backend.create_adapter(
        adapter.adapter_id, adapter.lora_config, adapter.training_config, full_parameters=adapter.full_parameters
    )
    # What was asked for is no more what is in use.
    return replace(adapter, training_config=made.training_config)


def _compute_verb(operation: Operation) -> ComputeVerb:
    if isinstance(operation.verb, StateVerb):
        raise AdapterDamaged(operation.adapter_id, f'{operation.verb_name} is among what is to be replayed')
    return operation.verb
