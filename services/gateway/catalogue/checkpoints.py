"""Operations on checkpoints, and the wiring of the catalogue to a database.

The checkpoint service makes all changes, and reports them in a feed (see `follow`). `delete`, `set_ttl` and
`set_public` also update the catalogue immediately. A copy is listed as soon as the feed reports it.
"""

import asyncio
import hashlib
from dataclasses import dataclass
from datetime import timedelta

from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.catalogue.rules import Checkpoint, CheckpointFilter
from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.catalogue.sql import SqlCheckpointStore, SqlRunStore
from twinkle_services.gateway.paging import Listing, Page
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.ids import new_id

_KEY_BYTES = 16


class Checkpoints:
    """Lists and changes the checkpoints of a caller, who must be the current caller of the context.

    Methods for one checkpoint raise a DomainError if the caller has no checkpoint at the path (CHECKPOINT_NOT_FOUND),
    or if the checkpoint service fails.
    """

    def __init__(self, client: GrpcCheckpoints, store: SqlCheckpointStore, *, clock: Clock) -> None:
        self._client = client
        self._store = store
        self._clock = clock
        self._copies: set[asyncio.Task[Checkpoint]] = set()

    async def list(self, caller: Caller, page: Page, wanted: CheckpointFilter) -> Listing[Checkpoint]:
        """Return one page of the caller's checkpoints that match `wanted`, newest first."""
        return await self._store.list_newest(caller.tenant_id, page, wanted)

    async def delete(self, caller: Caller, path: str) -> None:
        await self._client.delete(path)
        # The part after the scheme is the checkpoint's id.
        key = caller.tenant_id, path.partition('://')[2]
        await self._store.mark_deleted(key, moment=self._clock.now())

    async def set_ttl(self, path: str, ttl: timedelta | None) -> Checkpoint:
        """Set a checkpoint to expire `ttl` from now; None removes the expiry."""
        return await self._saved(await self._client.set_ttl(path, ttl))

    async def set_public(self, path: str, *, is_public: bool) -> Checkpoint:
        """Make a checkpoint readable by every tenant, or by its own tenant only.

        Raises:
            DomainError: another tenant has a public checkpoint at that path (ID_TAKEN).
        """
        return await self._saved(await self._client.set_public(path, is_public=is_public))

    async def copy(
        self, caller: Caller, path: str, *, name: str, run_id: str = '', key: str = '', ttl: timedelta | None
    ) -> Checkpoint:
        """Copy a checkpoint that the caller may read.

        Idempotency: with `run_id` or `key`, a repeated request returns the same copy, even after a cancelled call.

        Args:
            caller: owner of the copy.
            path: path of the checkpoint.
            name: name of the copy within its run.
            run_id: run of the copy; empty selects a new run.
            key: idempotency key of a copy with a new run; empty if absent.
            ttl: lifetime of the copy; None for a copy without expiry.

        Raises:
            QuotaExceeded: the tenant's storage is full.
        """
        run_id = run_id or (_copy_run_id(caller.tenant_id, key) if key else new_id('cp'))
        task = asyncio.create_task(self._client.copy(path, run_id=run_id, name=name, ttl=ttl))
        self._copies.add(task)
        task.add_done_callback(self._on_copy_done)
        return await asyncio.shield(task)

    async def _saved(self, changed: Checkpoint) -> Checkpoint:
        await self._store.save(changed)
        return changed

    def _on_copy_done(self, task: asyncio.Task[Checkpoint]) -> None:
        self._copies.discard(task)
        if not task.cancelled():
            # A cancelled caller does not retrieve the exception, which asyncio would then log.
            task.exception()


def _copy_run_id(tenant_id: str, key: str) -> str:
    return f'cp-{hashlib.blake2s(f"{tenant_id} {key}".encode(), digest_size=_KEY_BYTES).hexdigest()}'


@dataclass(frozen=True)
class Catalogue:
    """Runs and checkpoints of all tenants."""

    runs: Runs
    checkpoints: Checkpoints
    client: GrpcCheckpoints
    """Client of the checkpoint service."""


def open_catalogue(database: Database, client: GrpcCheckpoints, *, clock: Clock) -> Catalogue:
    """Return the catalogue that is stored in `database` and changes checkpoints through `client`."""
    checkpoints = Checkpoints(client, SqlCheckpointStore(database), clock=clock)
    return Catalogue(Runs(SqlRunStore(database)), checkpoints, client)
