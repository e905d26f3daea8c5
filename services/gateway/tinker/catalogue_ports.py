"""What the catalogue's routes need beside the gateway's own ports."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Protocol

from services.gateway.catalogue.rules import ArchivePart, Checkpoint, Run, UploadRequest
from services.gateway.paging import Counted, Slice
from services.gateway.sessions.rules import Session

SamplerIds = Callable[[str], Awaitable[Sequence[str]]]
"""Returns the ids of a session's sampling sessions, of the current caller."""


class Browser(Protocol):
    """Reads the catalogue by place and count. Everything is of the tenant, newest first."""

    async def runs(self, tenant_id: str, part: Slice, *, project_id: str = '') -> Counted[Run]:
        """Return some of its runs; with a project, only of the sessions that belong to it."""
        ...

    async def checkpoints(self, tenant_id: str, part: Slice) -> Counted[Checkpoint]:
        """Return some of its checkpoints."""
        ...

    async def sessions(self, tenant_id: str, part: Slice, *, project_id: str = '') -> Counted[Session]:
        """Return some of its sessions, or of a project's, in the state that was written down last."""
        ...

    async def checkpoints_of(self, tenant_id: str, run_ids: Collection[str]) -> Sequence[Checkpoint]:
        """Return the checkpoints of some runs."""
        ...

    async def run_ids(self, tenant_id: str, *, session_id: str) -> Sequence[str]:
        """Return the ids of its runs that were made in a session, oldest first."""
        ...

    async def stored(self, tenant_id: str, *, session_id: str = '', project_id: str = '') -> tuple[int, int]:
        """Return number and bytes of its checkpoints, or of those of a session's or a project's runs."""
        ...


class Keeper(Protocol):
    """Asks the checkpoint service on behalf of the current caller. Every verb raises that service's own error."""

    async def get(self, path: str) -> Checkpoint:
        """Return one that the caller may read."""
        ...

    async def list_of(self, run_id: str) -> Sequence[Checkpoint]:
        """Return all of a run of the caller, newest first; none of one that is not its."""
        ...

    async def copy(self, path: str, *, run_id: str, name: str, ttl: timedelta | None) -> Checkpoint:
        """Return a copy of one that the caller may read."""
        ...

    def archive(self, path: str, *, offset: int) -> AsyncGenerator[ArchivePart, None]:
        """Yield the tar archive of one from a byte on, piece by piece; at its end one that is empty."""
        ...


class Uploads(Protocol):
    """Takes archives of peft folders on behalf of the current caller."""

    async def upload(self, request: UploadRequest, parts: AsyncIterator[bytes], *, offset: int) -> Checkpoint:
        """Return the checkpoint that an archive became, of which `parts` are the bytes from `offset` on.

        Raises:
            StreamOutOfOrder: not all of it has come; its `offset` says how much has.
            DomainError: the checkpoint service's own.
        """
        ...
