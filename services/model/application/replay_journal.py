"""Run a journal again on another engine, and find where it parts from what is on record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.kit.errors import AdapterNotFound, DomainError
from services.model.application.progress import result_of
from services.model.application.restore import begin_from
from services.model.domain.adapter import Adapter
from services.model.domain.divergence import first_difference
from services.model.domain.errors import AdapterDamaged
from services.model.domain.operation import Operation, StateVerb
from services.model.domain.result import OperationResult
from services.model.ports import Journal, JournalEntry, Snapshot, TrainerBackend

Report = Callable[[str], None]
"""Told each line."""


@dataclass(frozen=True)
class Divergence:
    """The first outcome that did not come out as on record."""

    adapter_id: str
    sequence_number: int
    verb_name: str
    difference: str
    """The field, what is on record and what was found."""


@dataclass(frozen=True)
class Replayed:
    """What came of a replay."""

    operation_count: int = 0
    """Replayed and the same to the bit."""
    adapter_count: int = 0
    divergence: Divergence | None = None


class ReplayJournal:
    """Replays; neither journal nor adapters of a service are changed."""

    def __init__(self, journal: Journal, backend: TrainerBackend, *, report: Report) -> None:
        """Replay `journal` on `backend`."""
        self._journal = journal
        self._backend = backend
        self._report = report

    async def __call__(self, adapter_id: str | None = None) -> Replayed:
        """Replay every adapter, or one, from the oldest kept state, up to the first divergence.

        Raises:
            AdapterNotFound, AdapterDamaged: what is kept is not enough.
        """
        adapters = [item.adapter for item in await self._journal.adapters()]
        chosen = [adapter for adapter in adapters if adapter_id in (None, adapter.adapter_id)]
        if not chosen and adapter_id is not None:
            raise AdapterNotFound(adapter_id)
        replayed = Replayed()
        for adapter in chosen:
            found = await self._replay(adapter)
            replayed = Replayed(
                replayed.operation_count + found.operation_count, replayed.adapter_count + 1, found.divergence
            )
            if replayed.divergence is not None:
                break
        return replayed

    async def _replay(self, adapter: Adapter) -> Replayed:
        """Replay one adapter, over each stretch of its history that can be replayed."""
        replayed, newest = Replayed(), await self._journal.snapshot_before(adapter.adapter_id)
        for snapshot, entries in await self._stretches(adapter, newest):
            self._report(f'{adapter.adapter_id}: {len(entries)} operations after {snapshot.sequence_number}')
            await begin_from(snapshot, self._backend)
            for entry in entries:
                divergence = await self._replay_one(entry)
                if divergence is not None:
                    return replace(replayed, divergence=divergence)
                replayed = replace(replayed, operation_count=replayed.operation_count + 1)
            await self._backend.delete_adapter(adapter.adapter_id)
        return replayed

    async def _stretches(self, adapter: Adapter, newest: Snapshot) -> list[tuple[Snapshot, Sequence[JournalEntry]]]:
        """Return, oldest first, where a replay can begin, and the operations from there to the next such place."""
        stretches: list[tuple[Snapshot, Sequence[JournalEntry]]] = []
        snapshot: Snapshot | None = newest
        until = adapter.sequence_number
        while snapshot is not None:
            number = snapshot.sequence_number
            stretches.append((snapshot, await self._unbroken(adapter.adapter_id, number, until)))
            until = number
            snapshot = await self._before(adapter.adapter_id, number)
        return stretches[::-1]

    async def _unbroken(self, adapter_id: str, after: int, until: int) -> Sequence[JournalEntry]:
        """Return the operations up to the first that cannot be replayed.

        Of older history only what an undo needs is kept.
        """
        found: Sequence[JournalEntry] = ()
        low, high = after, until
        while low < high:
            middle = (low + high + 1) // 2
            try:
                found = await self._journal.entries(adapter_id, after=after, until=middle)
                low = middle
            except AdapterDamaged:
                high = middle - 1
        if high < until:
            self._report(f'{adapter_id}: operations {high + 1} to {until} cannot be replayed')
        return found

    async def _before(self, adapter_id: str, number: int) -> Snapshot | None:
        if number == 0:
            return None
        try:
            return await self._journal.snapshot_before(adapter_id, at_most=number - 1)
        except AdapterDamaged:
            return None

    async def _replay_one(self, entry: JournalEntry) -> Divergence | None:
        operation = entry.operation
        outcome = await self._run(operation)
        difference = None if entry.outcome is None else first_difference(entry.outcome, outcome)
        if difference is None:
            return None
        return Divergence(operation.adapter_id, operation.sequence_number, operation.verb_name, difference)

    async def _run(self, operation: Operation) -> OperationResult | DomainError:
        assert not isinstance(operation.verb, StateVerb)  # noqa: S101 - the journal leaves them out
        try:
            return result_of(operation, await self._backend.run(operation.adapter_id, operation.verb))
        except DomainError as error:
            return error
