"""Feeds of entries that other services own, stores of their copies, and stores of rows that end."""

from collections.abc import AsyncIterator, Callable, Collection
from datetime import datetime
from typing import Any, Protocol, TypeVar

from twinkle_services.gateway.catalogue.rules import CatalogueEvent, EntryKey

Entry_contra = TypeVar('Entry_contra', contravariant=True)


class EntryStore(Protocol[Entry_contra]):
    """Stores copies of entries that another service owns."""

    async def save(self, entry: Entry_contra) -> None:
        """Store the current content of an entry. An entry that was marked as deleted exists again."""
        ...

    async def mark_deleted(self, key: EntryKey, *, moment: datetime) -> None:
        """Mark one entry as deleted at `moment`; an unknown key is ignored."""
        ...

    async def mark_absent_deleted(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        """Mark as deleted every entry whose key is not in `present`."""
        ...


class EndedRows(Protocol):
    """Store of rows that stay for some time after they have ended, such as entries, sessions, usage and metrics."""

    async def purge(self, *, before: datetime) -> int:
        """Remove the rows that ended before `before`, except rows that other rows need; return the number removed."""
        ...


Feed = Callable[[str], AsyncIterator[CatalogueEvent[Any]]]
"""Yields the events of another service's entries after a resume token. An empty token yields a snapshot, then
`SnapshotComplete`, and then changes. The iterator raises a DomainError if the service is unreachable, refuses the
token, or fails."""
