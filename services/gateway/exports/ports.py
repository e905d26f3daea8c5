"""Where exports are kept, what they are made of, and where they go."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from services.gateway.exports.rules import Export, Target
from services.gateway.paging import Page

ReportBytes = Callable[[int, int], None]
"""Told how many bytes of an archive have been read, and of how many."""


class ExportStore(Protocol):
    """Keeps exports across a kill at any moment. Several gateways may share one."""

    async def add_if_absent(self, export: Export, *, is_same: Callable[[Export], bool], most_unfinished: int) -> Export:
        """Keep the export, unless there is one in its place; return what is kept.

        In its place is the one of that tenant and request id, or else the oldest of the tenant's that is not over and
        of which `is_same` is true. Two that are the same and come at once are one.

        Raises:
            QuotaExceeded: it is new, and the tenant has as many that are not over.
        """
        ...

    async def find_request(self, tenant_id: str, request_id: str) -> Export | None:
        """Return the tenant's export of that request id, or None."""
        ...

    async def get(self, tenant_id: str, export_id: str) -> Export | None:
        """Return the tenant's export, or None."""
        ...

    async def list_newest(self, tenant_id: str, page: Page, *, checkpoint_path: str | None) -> Sequence[Export]:
        """Return one item more than the page where there are as many, newest first."""
        ...

    async def claim(self, now: datetime, *, lease: timedelta) -> Export | None:
        """Begin the export that has been due the longest, for `lease`, and return it; None: none is due.

        Nobody else claims it until the lease is over.
        """
        ...

    async def keep(self, export: Export, *, read_bytes: int, size_bytes: int, now: datetime, lease: timedelta) -> bool:
        """Note how far a claimed export is and lengthen its lease; False: it is no longer this claim's."""
        ...

    async def settle(self, export: Export) -> bool:
        """Write how a claimed export went; False: it was no longer this claim's, and nothing is written."""
        ...

    async def cancel(self, tenant_id: str, export_id: str, *, now: datetime) -> Export | None:
        """Cancel an export unless it is over; return it as it is then, or None."""
        ...

    async def forget(self, *, before: datetime) -> int:
        """Forget the exports that were over before that moment; return how many."""
        ...


class Sealer(Protocol):
    """Encrypts what has to be kept for a while and read by nobody else."""

    def seal(self, secret: str, *, purpose: str) -> bytes:
        """Return a secret encrypted; empty for an empty one. It opens for the same purpose only."""
        ...

    def open(self, sealed: bytes, *, purpose: str) -> str:
        """Return what was sealed.

        Raises:
            DomainError: it was not sealed here, or for something else.
        """
        ...


class ArchiveSource(Protocol):
    """Fetches checkpoints for the current caller, and knows where they lie meanwhile."""

    async def clear(self) -> None:
        """Delete what an earlier process left lying; nothing may be open."""
        ...

    def opened(self, path: str, *, digest: str, report: ReportBytes) -> AbstractAsyncContextManager[Path]:
        """Give a folder with the files of a checkpoint's peft folder during the block; it is gone after it.

        Raises:
            CheckpointChanged: it is no longer the one of that digest.
            DomainError: the checkpoint service's own.
        """
        ...


class Destination(Protocol):
    """Takes folders. Cancellation: what works for a call is ended with it."""

    def check(self, target: Target) -> None:
        """Check that it can take a folder for that target at all.

        Raises:
            DomainError: it cannot.
        """
        ...

    async def send(self, folder: Path, target: Target, *, tenant_id: str, token: str, is_private: bool) -> 'Sent':
        """Put the files of a folder there; the same files again change nothing.

        Raises:
            HubRefused: it does not take them, however often it is tried.
            InvalidField: other things are in their place.
            DomainError: it could not be done now.
        """
        ...


class Sent(Protocol):
    """Where a folder went."""

    @property
    def url(self) -> str:
        """For people to open."""
        ...

    @property
    def commit(self) -> str:
        """Of the files, where there are commits."""
        ...
