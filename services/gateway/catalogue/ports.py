"""The catalogue's copies of what other services own, where they come from, and where changes go."""

from collections.abc import AsyncIterator, Collection, Sequence
from datetime import datetime, timedelta
from typing import Protocol, TypeVar

from services.gateway.catalogue.rules import CatalogueEvent, Checkpoint, CheckpointFilter, EntryKey, Run, RunFilter
from services.gateway.paging import Page

Entry = TypeVar('Entry')
Entry_contra = TypeVar('Entry_contra', contravariant=True)


class Shelf(Protocol[Entry_contra]):
    """The catalogue's copy of entries that another service owns."""

    async def save(self, entry: Entry_contra) -> None:
        """Keep the entry as it is now; it is there, whatever was marked before."""
        ...

    async def mark_gone(self, key: EntryKey, *, moment: datetime) -> None:
        """Mark one entry as gone; an unknown one is no error."""
        ...

    async def mark_absent_gone(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        """Mark every entry as gone whose key is not in `present`."""
        ...


class RunStore(Shelf[Run], Protocol):
    """Keeps runs. A run that is gone stays listed, inactive."""

    async def get(self, tenant_id: str, run_id: str) -> Run | None:
        """Return the tenant's run, or None."""
        ...

    async def list_newest(self, tenant_id: str, page: Page, wanted: RunFilter) -> Sequence[Run]:
        """Return one item more than the page where there are as many, newest first."""
        ...


class CheckpointStore(Shelf[Checkpoint], Protocol):
    """Keeps checkpoints. One that is gone is listed no more; its row stays."""

    async def list_newest(self, tenant_id: str, page: Page, wanted: CheckpointFilter) -> Sequence[Checkpoint]:
        """Return one item more than the page where there are as many, newest first."""
        ...


class CheckpointKeeper(Protocol):
    """Changes checkpoints of the current caller where they are kept. Every verb raises that service's own error."""

    async def delete(self, path: str) -> None:
        """Delete one."""
        ...

    async def set_ttl(self, path: str, ttl: timedelta | None) -> Checkpoint:
        """Have one deleted after `ttl` from now, or kept, and return it."""
        ...

    async def set_public(self, path: str, *, is_public: bool) -> Checkpoint:
        """Let every tenant read one, or its owner alone, and return it."""
        ...


class Feed(Protocol[Entry]):
    """Entries of another service, as they change."""

    def follow(self, resume_token: str) -> AsyncIterator[CatalogueEvent[Entry]]:
        """Return the events after `resume_token`; empty: a whole snapshot, `Synced`, then changes.

        Raises:
            DomainError: while iterating: the service cannot be reached, or does not know the token any more.
        """
        ...
