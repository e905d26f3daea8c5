"""Replays a journal on an engine, and finds the first result that differs from the record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from twinkle_services.kit.errors import AdapterNotFound, DomainError
from twinkle_services.model.application.progress import result_of
from twinkle_services.model.application.restore import begin_from
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.divergence import first_difference
from twinkle_services.model.domain.errors import AdapterDamaged
from twinkle_services.model.domain.journal import JournalEntry, Snapshot
from twinkle_services.model.domain.operation import Operation, StateVerb
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.ports import Journal, TrainerBackend

Report = Callable[[str], None]
"""Receives progress lines."""


@dataclass(frozen=True)
class Divergence:
    """The first outcome that differs from the record."""

    adapter_id: str
    sequence_number: int
    verb_name: str
    difference: str
    """The field, the recorded value and the replayed value."""


@dataclass(frozen=True)
class ReplayResult:
    """Result of a replay."""

    operation_count: int = 0
    """Number of operations that were replayed without a difference from the record."""
    adapter_count: int = 0
    left_out_count: int = 0
    """Number of full-parameter runs that were left out."""
    divergence: Divergence | None = None


class FindDivergence:
    """Replays a journal without changing it."""

    def __init__(self, journal: Journal, backend: TrainerBackend, *, report: Report, is_sharded: bool = False) -> None:
        """Create a replay.

        Args:
            journal: Journal to replay.
            backend: Engine that repeats the operations.
            report: Receives progress lines.
            is_sharded: Whether FSDP divided the model of the service that wrote the journal. Full-parameter runs are
                then left out, because their rounding depends on the mesh.
        """
        self._journal = journal
        self._backend = backend
        self._report = report
        self._is_sharded = is_sharded

    async def __call__(self, adapter_id: str | None = None) -> ReplayResult:
        """Replay one or all adapters from their oldest stored state, up to the first divergence.

        Raises:
            AdapterNotFound: There is no such adapter.
            AdapterDamaged: An adapter's stored data is incomplete or cannot be read.
            JournalUnavailable: The disk failed.
        """
        adapters = [item.adapter for item in await self._journal.adapters()]
        chosen = [adapter for adapter in adapters if adapter_id in (None, adapter.adapter_id)]
        if not chosen and adapter_id is not None:
            raise AdapterNotFound(adapter_id)
        replayed = ReplayResult()
        for adapter in chosen:
            if self._is_sharded and adapter.is_full_parameter:
                self._report(f'{adapter.adapter_id}: left out; mesh.fsdp changes its rounding')
                replayed = replace(replayed, left_out_count=replayed.left_out_count + 1)
                continue
            found = await self._replay(adapter)
            replayed = replace(
                replayed,
                operation_count=replayed.operation_count + found.operation_count,
                adapter_count=replayed.adapter_count + 1,
                divergence=found.divergence,
            )
            if replayed.divergence is not None:
                break
        return replayed

    async def _replay(self, adapter: Adapter) -> ReplayResult:
        """Replay each section of an adapter's history that can be replayed."""
        replayed, newest = ReplayResult(), await self._journal.snapshot_before(adapter.adapter_id)
        for snapshot, entries in await self._sections(adapter, newest):
            self._report(f'{adapter.adapter_id}: {len(entries)} operations after {snapshot.sequence_number}')
            await begin_from(snapshot, self._backend)
            for entry in entries:
                divergence = await self._replay_one(entry)
                if divergence is not None:
                    return replace(replayed, divergence=divergence)
                replayed = replace(replayed, operation_count=replayed.operation_count + 1)
            await self._backend.delete_adapter(adapter.adapter_id)
        return replayed

    async def _sections(self, adapter: Adapter, newest: Snapshot) -> list[tuple[Snapshot, Sequence[JournalEntry]]]:
        """Return the replayable sections of the history, oldest first: each snapshot with the operations after it."""
        sections: list[tuple[Snapshot, Sequence[JournalEntry]]] = []
        snapshot: Snapshot | None = newest
        until = adapter.sequence_number
        while snapshot is not None:
            number = snapshot.sequence_number
            sections.append((snapshot, await self._replayable(adapter.adapter_id, number, until)))
            until = number
            snapshot = await self._before(adapter.adapter_id, number)
        return sections[::-1]

    async def _replayable(self, adapter_id: str, after: int, until: int) -> Sequence[JournalEntry]:
        """Return the operations before the first one that cannot be replayed.

        The journal stores only as much of the older history as undo needs.
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
        assert not isinstance(operation.verb, StateVerb)  # noqa: S101 - the journal does not return state verbs
        try:
            return result_of(operation, await self._backend.run(operation.adapter_id, operation.verb))
        except DomainError as error:
            return error
