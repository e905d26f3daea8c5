"""Storage port for exports, and the source of checkpoint files."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from services.gateway.exports.rules import Export
from services.gateway.paging import Page

ReportBytes = Callable[[int, int], None]
"""Receives the number of bytes of an archive that have been read, and the size of the archive in bytes."""


class ExportStore(Protocol):
    """Stores exports durably. Several gateways may share one store."""

    async def add_if_absent(self, export: Export, *, is_same: Callable[[Export], bool], max_unfinished: int) -> Export:
        """Add the export unless an equivalent one exists; return the stored one.

        The equivalent export is the tenant's export with the same request id. Without such an export, it is the
        tenant's oldest unfinished export for which `is_same` holds. Concurrent equivalent requests add one export.

        Raises:
            QuotaExceeded: the export is new, and the tenant has `max_unfinished` unfinished exports.
        """
        ...

    async def find_request(self, tenant_id: str, request_id: str) -> Export | None:
        """Return the tenant's export with that request id, or None."""
        ...

    async def get(self, tenant_id: str, export_id: str) -> Export | None:
        """Return the tenant's export, or None."""
        ...

    async def list_newest(self, tenant_id: str, page: Page, *, checkpoint_path: str | None) -> Sequence[Export]:
        """Return the items of a page, newest first, and one more item if there is a next page."""
        ...

    async def claim(self, now: datetime, *, lease: timedelta) -> Export | None:
        """Claim the export that has been due longest, and count an attempt; return None if no export is due.

        No other gateway can claim the export until it is settled, or `lease` has passed without a renewal.
        """
        ...

    async def renew(self, export: Export, *, read_bytes: int, size_bytes: int, now: datetime, lease: timedelta) -> bool:
        """Record the progress of a claimed export and renew its lease; return False if the claim was lost."""
        ...

    async def settle(self, export: Export) -> bool:
        """Store the outcome of a claimed export. If the claim was lost, store nothing and return False."""
        ...

    async def cancel(self, tenant_id: str, export_id: str, *, now: datetime) -> Export | None:
        """Cancel an export unless it is finished; return its current state, or None if it is unknown."""
        ...

    async def delete_finished(self, *, before: datetime) -> int:
        """Delete the exports that finished before a time; return the number of deleted exports."""
        ...


class ArchiveSource(Protocol):
    """Fetches checkpoints for the current caller to the local disk."""

    async def clear(self) -> None:
        """Delete the files of earlier processes. Call this only while no folder is open."""
        ...

    def opened(self, path: str, *, digest: str, report: ReportBytes) -> AbstractAsyncContextManager[Path]:
        """Provide a folder with a checkpoint's files in PEFT format; the folder is deleted at the end of the block.

        Raises:
            CheckpointChanged: the checkpoint no longer has that digest.
            DigestMismatch: the received archive is damaged.
            DomainError: the checkpoint service refused a call or failed.
            OSError: the local disk failed.
        """
        ...
