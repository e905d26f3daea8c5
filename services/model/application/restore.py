"""Restores an adapter by loading its newest snapshot and replaying the operations after it.

Restores are used for recovery after a crash, for loading evicted adapters and for undo.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import AdapterNotFound, DomainError, Internal
from twinkle_services.kit.failpoints import reach
from twinkle_services.model.application.attempts import MAX_ATTEMPTS
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.progress import adapter_after, result_of
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.divergence import first_difference
from twinkle_services.model.domain.engine import VerbRun
from twinkle_services.model.domain.errors import AdapterDamaged, OperationCrashed
from twinkle_services.model.domain.journal import JournalEntry, Snapshot
from twinkle_services.model.domain.operation import ComputeVerb, Operation, StateVerb
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.domain.sequence import is_refusal
from twinkle_services.model.ports import Journal, TrainerBackend

_log = structlog.get_logger('restore')
MAX_RESTORES = 5
"""Number of consecutive restores that may end the process without progress. After that, the adapter is not restored
again, so that a snapshot or a recorded operation that ends the process cannot prevent the service from starting."""
_CRASHED = (
    f'the service crashed during {MAX_RESTORES} restores in a row; start the service once with forget_crashes: true to '
    'try again'
)
_PROGRESS_EVERY = 100
"""Number of replayed operations between two progress logs."""
_NOTE_EVERY = 16
"""Number of replayed operations between two durable records of the progress."""


@dataclass(frozen=True, kw_only=True)
class RestoredAdapter:
    """A restored adapter and statistics of its replay."""

    adapter: Adapter
    snapshot_number: int
    """Number of the last operation in the snapshot."""
    replayed_count: int = 0
    device_seconds: float = 0.0
    """Engine time of the replay, in seconds."""
    divergence_count: int = 0
    """Number of outcomes that differ from the record."""


class _OperationSkipped(Exception):
    """An operation failed because of a defect and is now marked as skipped; the restore must start again without it."""


class Restore:
    """Restores adapters into the engine."""

    def __init__(self, backend: TrainerBackend, journal: Journal, directory: AdapterDirectory, *, clock: Clock) -> None:
        self._backend = backend
        self._journal = journal
        self._directory = directory
        self._clock = clock
        self._damaged: set[str] = set()
        """Adapters whose damage has been logged."""
        self.divergence_count = 0
        """Number of replayed operations that differed from the record, since the service started."""

    async def __call__(self, current: Adapter, *, until: int | None = None) -> RestoredAdapter:
        """Restore an adapter to its state after operation `until`, or after the last one.

        Missing outcomes are recorded in the journal and in the directory. A refused operation is removed. An operation
        is skipped from now on if it fails because of a defect, or ends the process in each of `MAX_ATTEMPTS` attempts.
        It therefore cannot block the adapter or the service. Attempts and restores are counted durably before they
        begin.

        Args:
            current: The adapter in its current state; the restored adapter keeps its published version, its lease and
                the end of its session.
            until: Number of the last operation to include; None for all.

        Raises:
            AdapterNotFound, AdapterDamaged: The adapter cannot be restored and is not in the engine.
            JournalUnavailable: An attempt or a new outcome could not be recorded.
        """
        adapter_id, is_done = current.adapter_id, False
        await self._begin(adapter_id)
        try:
            restored = None
            while restored is None:
                with suppress(_OperationSkipped):
                    restored = await self._attempt(current, until)
            is_done = True
        except AdapterDamaged as error:
            self._report(error)
            raise
        finally:
            self._journal.reset_attempts(_work_of(adapter_id))
            if not is_done:
                await self._backend.delete_adapter(adapter_id)
        return restored

    async def _begin(self, adapter_id: str) -> None:
        """Count a restore durably.

        Raises:
            AdapterDamaged: The process ended during each of the last restores.
        """
        count = await self._journal.count_attempt(_work_of(adapter_id))
        if count > MAX_RESTORES:
            error = AdapterDamaged(adapter_id, _CRASHED)
            self._report(error)
            raise error
        reach('restore.begun')

    def _report(self, error: AdapterDamaged) -> None:
        """Log the problem of a damaged adapter once, because the error that the tenant receives does not contain it."""
        if error.adapter_id not in self._damaged:
            self._damaged.add(error.adapter_id)
            _log.error('adapter damaged', adapter=error.adapter_id, problem=error.problem)

    async def _attempt(self, current: Adapter, until: int | None) -> RestoredAdapter:
        snapshot = await self._journal.snapshot_before(current.adapter_id, at_most=until)
        begun = await begin_from(snapshot, self._backend)
        adapter = replace(
            begun, version=current.version, has_lease=current.has_lease, session_end_time=current.session_end_time
        )
        restored = RestoredAdapter(adapter=adapter, snapshot_number=snapshot.sequence_number)
        return await self._replay(restored, current, until)

    async def _replay(self, restored: RestoredAdapter, current: Adapter, until: int | None) -> RestoredAdapter:
        adapter_id = current.adapter_id
        entries = await self._journal.entries(adapter_id, after=restored.snapshot_number, until=until)
        for entry in entries:
            if entry.outcome is None and await self._journal.begin_attempt(entry.operation) >= MAX_ATTEMPTS:
                restored = await self._fail_crashed(restored, current, entry.operation)
                continue
            reach('restore.replaying')
            restored = await self._replay_one(restored, current, entry)
            if restored.replayed_count % _NOTE_EVERY == 0:
                await self._journal.note_progress(_work_of(adapter_id), position=entry.operation.sequence_number)
            if restored.replayed_count % _PROGRESS_EVERY == 0:
                _log.info('replay progress', adapter=adapter_id, done=restored.replayed_count, total=len(entries))
        return restored

    async def _replay_one(self, restored: RestoredAdapter, current: Adapter, entry: JournalEntry) -> RestoredAdapter:
        operation = entry.operation
        run, outcome = await self._run(entry)
        adapter = self._adapter_after(restored, current, operation, run)
        if entry.outcome is None and isinstance(outcome, Internal):
            # An operation that failed because of a defect has no effect, and the engine's state is undefined.
            await self._journal.settle(adapter, operation, outcome)
            self._update_directory(adapter)
            raise _OperationSkipped
        if entry.outcome is None and is_refusal(outcome):
            await self._journal.revoke(operation)
            return restored
        if entry.outcome is None:
            self._journal.note(adapter, operation, outcome)
            self._update_directory(adapter)
        return replace(
            restored,
            adapter=adapter,
            replayed_count=restored.replayed_count + 1,
            device_seconds=restored.device_seconds + (run.device_seconds if run else 0.0),
            divergence_count=restored.divergence_count + self._compare(operation, entry.outcome, outcome),
        )

    def _adapter_after(
        self, restored: RestoredAdapter, current: Adapter, operation: Operation, run: VerbRun | None
    ) -> Adapter:
        adapter = adapter_after(restored.adapter, operation, run, now=self._clock.now())
        # Saves are not replayed, so the known checkpoint stays valid unless a step followed it.
        is_current_step = adapter.step_count == current.step_count
        return replace(adapter, checkpoint_path=current.checkpoint_path if is_current_step else '')

    async def _fail_crashed(self, restored: RestoredAdapter, current: Adapter, operation: Operation) -> RestoredAdapter:
        """Record that an operation failed because the process ended during each attempt, and skip the operation."""
        adapter = self._adapter_after(restored, current, operation, None)
        error = OperationCrashed(operation.adapter_id, operation.sequence_number)
        _log.error(
            'operation crashed the service',
            adapter=operation.adapter_id,
            operation=operation.sequence_number,
            verb=operation.verb_name,
            attempts=MAX_ATTEMPTS,
        )
        await self._journal.settle(adapter, operation, error)
        self._update_directory(adapter)
        self._journal.reset_attempts(_work_of(operation.adapter_id))
        return replace(restored, adapter=adapter)

    def _update_directory(self, adapter: Adapter) -> None:
        """Update an adapter in the directory when an outcome is recorded, because the restore may fail afterwards.

        Nothing changes if the adapter in the directory includes a later operation: state verbs are not replayed, so the
        replayed operation may be an earlier one.
        """
        known = self._directory.find(adapter.adapter_id)
        if known is not None and known.sequence_number < adapter.sequence_number:
            self._directory.update(
                adapter.adapter_id,
                sequence_number=adapter.sequence_number,
                step_count=adapter.step_count,
                trained_token_count=adapter.trained_token_count,
                training_config=adapter.training_config,
                checkpoint_path=adapter.checkpoint_path,
                metrics=adapter.metrics,
                update_time=adapter.update_time,
            )

    async def _run(self, entry: JournalEntry) -> tuple[VerbRun | None, OperationResult | DomainError]:
        operation = entry.operation
        try:
            run = await self._backend.run(operation.adapter_id, _compute_verb(operation))
        except AdapterNotFound as error:
            raise AdapterDamaged(operation.adapter_id, 'the engine lost the adapter during the replay') from error
        except DomainError as error:
            return None, error
        finally:
            if entry.outcome is None:
                self._journal.end_attempt(operation)
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


def _work_of(adapter_id: str) -> str:
    return f'restores of {adapter_id}'


async def begin_from(snapshot: Snapshot, backend: TrainerBackend) -> Adapter:
    """Create or replace an adapter in the engine from a snapshot, and return the adapter."""
    adapter = snapshot.adapter
    if snapshot.state is not None:
        state = replace(snapshot.state, full_parameters=adapter.full_parameters)
        await backend.restore_adapter(adapter.adapter_id, state)
        return adapter
    await backend.delete_adapter(adapter.adapter_id)
    created = await backend.create_adapter(
        adapter.adapter_id, adapter.lora_config, adapter.training_config, full_parameters=adapter.full_parameters
    )
    # The engine's configuration includes the defaults.
    return replace(adapter, training_config=created.training_config)


def _compute_verb(operation: Operation) -> ComputeVerb:
    if isinstance(operation.verb, StateVerb):
        raise AdapterDamaged(operation.adapter_id, f'{operation.verb_name} cannot be replayed')
    return operation.verb
