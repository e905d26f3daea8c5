"""A journal in memory, for tests and for services without a durable journal.

It drops old entries and supports undo like the journal on disk, but is lost when the process exits.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from twinkle_services.kit.errors import AdapterNotFound, DomainError
from twinkle_services.model.domain.adapter import MAX_CREATIONS, MAX_EXPIRED, Adapter, CreationRecord, ExpiredAdapter
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.errors import AdapterDamaged, TakeoverRefused
from twinkle_services.model.domain.journal import JournaledAdapter, JournalEntry, RecordEntry, Snapshot
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.domain.retention import ReplayKind, is_applied_step, retain
from twinkle_services.model.domain.sequence import RECORD_LENGTH


@dataclass
class _Row:
    operation: Operation | None
    """The operation; None if it is never replayed, such as a save, or is no longer needed for a restore."""
    fingerprint: str
    kind: ReplayKind
    outcome: OperationResult | DomainError | None = None
    attempt_count: int = 0


@dataclass
class _AdapterHistory:
    adapter: Adapter
    snapshots: dict[int, Snapshot]
    rows: dict[int, _Row] = field(default_factory=dict[int, _Row])
    steps: list[int] = field(default_factory=list[int])


class MemoryJournal:
    """Implements `twinkle_services.model.ports.Journal`."""

    def __init__(self, *, undo_steps: int = 8) -> None:
        self._undo_steps = undo_steps
        self._adapters: dict[str, _AdapterHistory] = {}
        self._creations: list[CreationRecord] = []
        self._creation_by_adapter: dict[str, CreationRecord] = {}
        self._expired: list[ExpiredAdapter] = []
        self.was_killed = False
        self._attempts: Counter[str] = Counter()
        self._progress: dict[str, int] = {}

    @property
    def ids(self) -> Sequence[str]:
        return ()

    async def take_over(self, trainer: str) -> Sequence[JournaledAdapter]:
        raise TakeoverRefused(trainer, "this service has no durable journal; set journal: 'sqlite', or ask another one")

    async def complete_take_over(self) -> None:
        """Do nothing: no takeover can have succeeded."""

    async def adapters(self) -> Sequence[JournaledAdapter]:
        return [
            JournaledAdapter(adapter=history.adapter, is_settled=_is_settled(history))
            for history in self._adapters.values()
        ]

    async def damaged_adapters(self) -> Mapping[str, str]:
        return {}

    async def creations(self) -> Sequence[CreationRecord]:
        return list(self._creations)

    async def creation_of(self, adapter_id: str) -> CreationRecord | None:
        return self._creation_by_adapter.get(adapter_id)

    async def add_adapter(
        self, adapter: Adapter, creation: CreationRecord, *, origin: Adapter, state: AdapterState | None
    ) -> None:
        first = Snapshot(sequence_number=0, adapter=origin if state is None else adapter, state=state)
        self._adapters[adapter.adapter_id] = _AdapterHistory(adapter, {0: first})
        self._creations = [*self._creations, creation][-MAX_CREATIONS:]
        self._creation_by_adapter[adapter.adapter_id] = creation

    async def remove_adapter(self, adapter_id: str, *, expired: ExpiredAdapter | None = None) -> None:
        is_known = self._adapters.pop(adapter_id, None) is not None
        if is_known and expired is not None:
            self._expired = [*self._expired, expired][-MAX_EXPIRED:]
        for work in [work for work in self._attempts if work.endswith(f' of {adapter_id}')]:
            self.reset_attempts(work)

    async def expired_adapters(self) -> Sequence[ExpiredAdapter]:
        return list(self._expired)

    async def accept(self, operation: Operation) -> None:
        row = _Row(operation, operation.fingerprint, ReplayKind.REPLAYED)
        self._history_of(operation.adapter_id).rows[operation.sequence_number] = row

    async def begin_attempt(self, operation: Operation) -> int:
        row = self._history_of(operation.adapter_id).rows[operation.sequence_number]
        row.attempt_count += 1
        return row.attempt_count

    def end_attempt(self, operation: Operation) -> None:
        history = self._adapters.get(operation.adapter_id)
        row = None if history is None else history.rows.get(operation.sequence_number)
        if row is not None:
            row.attempt_count = 0

    async def count_attempt(self, work: str) -> int:
        self._attempts[work] += 1
        return self._attempts[work]

    async def note_progress(self, work: str, *, position: int) -> None:
        if position > self._progress.get(work, 0):
            self._progress[work], self._attempts[work] = position, 1

    def reset_attempts(self, work: str) -> None:
        del self._attempts[work]
        self._progress.pop(work, None)

    async def revoke(self, operation: Operation) -> None:
        self._history_of(operation.adapter_id).rows.pop(operation.sequence_number, None)

    def note(self, adapter: Adapter, operation: Operation, outcome: OperationResult | DomainError) -> None:
        history = self._adapters.get(adapter.adapter_id)
        row = None if history is None else history.rows.get(operation.sequence_number)
        if history is None or row is None:
            return
        row.outcome = outcome
        _update_adapter(history, adapter)
        if is_applied_step(operation, outcome) and operation.sequence_number not in history.steps:
            history.steps = sorted([*history.steps, operation.sequence_number])

    async def settle(
        self,
        adapter: Adapter,
        operation: Operation,
        outcome: OperationResult | DomainError,
        *,
        state: AdapterState | None = None,
        undone_from: int | None = None,
    ) -> None:
        history, number = self._history_of(adapter.adapter_id), operation.sequence_number
        kind = ReplayKind.SKIPPED if state is None else ReplayKind.BARRIER
        history.rows[number] = _Row(None, operation.fingerprint, kind, outcome)
        _update_adapter(history, adapter)
        if undone_from is not None:
            _undo(history, undone_from, number)
        if state is not None:
            await self.add_snapshot(Snapshot(sequence_number=number, adapter=adapter, state=state))

    async def add_snapshot(self, snapshot: Snapshot) -> None:
        history = self._adapters.get(snapshot.adapter.adapter_id)
        if history is not None:
            history.snapshots[snapshot.sequence_number] = snapshot
            _trim(history, self._undo_steps)

    async def amend(self, adapter: Adapter) -> None:
        _update_adapter(self._history_of(adapter.adapter_id), adapter)

    async def snapshot_before(self, adapter_id: str, *, at_most: int | None = None) -> Snapshot:
        numbers = sorted(self._history_of(adapter_id).snapshots)
        count = len(numbers) if at_most is None else bisect_right(numbers, at_most)
        if not count:
            raise AdapterDamaged(
                adapter_id, 'no snapshot' if at_most is None else f'no snapshot up to operation {at_most}'
            )
        return self._history_of(adapter_id).snapshots[numbers[count - 1]]

    async def entries(self, adapter_id: str, *, after: int, until: int | None = None) -> Sequence[JournalEntry]:
        rows, entries = self._history_of(adapter_id).rows, list[JournalEntry]()
        last = max(rows, default=0) if until is None else until
        for number in range(after + 1, last + 1):
            row = rows.get(number)
            if (
                row is None
                or row.kind is ReplayKind.BARRIER
                or (row.kind is ReplayKind.REPLAYED and row.operation is None)
            ):
                raise AdapterDamaged(adapter_id, f'operation {number} cannot be replayed')
            if row.operation is not None:
                entries.append(JournalEntry(operation=row.operation, outcome=row.outcome))
        return entries

    async def record(self, adapter_id: str, *, size: int) -> Sequence[RecordEntry]:
        rows = self._history_of(adapter_id).rows
        return [
            RecordEntry(sequence_number=number, fingerprint=rows[number].fingerprint, outcome=rows[number].outcome)
            for number in sorted(rows)[-size:]
        ]

    async def applied_steps(self, adapter_id: str) -> Sequence[int]:
        history = self._history_of(adapter_id)
        return retain(history.steps, sorted(history.snapshots), undo_steps=self._undo_steps).steps

    async def close(self) -> None:
        """Do nothing: the data stays in memory, because a test may use the same journal again."""

    def _history_of(self, adapter_id: str) -> _AdapterHistory:
        if adapter_id not in self._adapters:
            raise AdapterNotFound(adapter_id)
        return self._adapters[adapter_id]


def _is_settled(history: _AdapterHistory) -> bool:
    return all(row.outcome is not None for row in history.rows.values())


def _update_adapter(history: _AdapterHistory, adapter: Adapter) -> None:
    if adapter.sequence_number >= history.adapter.sequence_number:
        history.adapter = replace(adapter, version=max(adapter.version, history.adapter.version))


def _undo(history: _AdapterHistory, undone_from: int, number: int) -> None:
    history.steps = [step for step in history.steps if step < undone_from]
    history.snapshots = {at: snapshot for at, snapshot in history.snapshots.items() if at < undone_from}
    for at in range(undone_from, number):
        if at in history.rows:
            history.rows[at].operation = None


def _trim(history: _AdapterHistory, undo_steps: int) -> None:
    retention = retain(history.steps, sorted(history.snapshots), undo_steps=undo_steps)
    history.steps = list(retention.steps)
    history.snapshots = {number: history.snapshots[number] for number in retention.snapshots}
    oldest_on_record = max(history.rows, default=0) - RECORD_LENGTH + 1
    for number, row in list(history.rows.items()):
        # An operation without an outcome is in progress and still needed.
        if row.outcome is None or (row.kind is ReplayKind.REPLAYED and retention.is_replayable(number)):
            continue
        row.operation = None
        if number < oldest_on_record and not retention.is_replayable(number):
            del history.rows[number]
