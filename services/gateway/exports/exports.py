"""Operations on exports. Requests are stored durably, and `runner` carries them out in the background."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.errors import ExportNotFound
from twinkle_services.gateway.exports.rules import MAX_UNFINISHED, Export, ExportRequest, check_token, parse_target
from twinkle_services.gateway.exports.sql import SqlExportStore
from twinkle_services.gateway.exports.transfers import ExportTargets
from twinkle_services.gateway.keys.pepper import PepperedSealer
from twinkle_services.gateway.paging import Listing, Page
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError, RequestIdReused
from twinkle_services.kit.ids import new_id


class ExportNotifier:
    """Wakes the runner when this process accepts or cancels an export. Use it from one event loop only."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    @contextmanager
    def waiter(self) -> Iterator[asyncio.Future[None]]:
        """Provide a future that completes with the first `notify` within the block.

        Read the store within the block and then await the future, so that no change is missed.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            self._waiters.discard(waiter)

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Exports:
    """Starts, lists and cancels the exports of a caller, who must be the current caller of the context.

    Methods for one export raise ExportNotFound if the caller has no such export.
    """

    def __init__(
        self,
        store: SqlExportStore,
        checkpoints: GrpcCheckpoints,
        targets: ExportTargets,
        *,
        sealer: PepperedSealer,
        notifier: ExportNotifier,
        clock: Clock,
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._targets = targets
        self._sealer = sealer
        self._notifier = notifier
        self._clock = clock

    async def start(self, caller: Caller, request: ExportRequest) -> Export:
        """Accept an export durably and return it.

        Idempotency: a repeated request id returns the export of that id, even if the checkpoint has been deleted. A
            request with the same checkpoint state, target, visibility and token as an unfinished export returns that
            export.

        Raises:
            InvalidField: the target is invalid, or the token is missing, superfluous or malformed.
            NotSupportedHere: the gateway cannot export to this target.
            DomainError: the caller has no access to such a checkpoint (CHECKPOINT_NOT_FOUND), or the service failed.
            RequestIdReused: the request id was used with different content; tokens are not compared.
            QuotaExceeded: the tenant has too many unfinished exports.
        """
        target = parse_target(request.target)
        check_token(target, request.hub_token)
        stored = await self._store.find_request(caller.tenant_id, request.request_id)
        if stored is None:
            checkpoint = await self._checkpoints.get(request.checkpoint_path)
            self._targets.check(target)
            stored = await self._add(self._new_export(caller, request, checkpoint.digest), request.hub_token)
        if not stored.is_same_request(request):
            raise RequestIdReused(request.request_id)
        return stored

    async def get(self, caller: Caller, export_id: str) -> Export:
        export = await self._store.get(caller.tenant_id, export_id)
        if export is None:
            raise ExportNotFound(export_id)
        return export

    async def list(self, caller: Caller, page: Page, *, checkpoint_path: str | None) -> Listing[Export]:
        """Return one page of the caller's exports, newest first. A `checkpoint_path` limits them to one checkpoint."""
        return await self._store.list_newest(caller.tenant_id, page, checkpoint_path=checkpoint_path)

    async def cancel(self, caller: Caller, export_id: str) -> Export:
        """Cancel an export unless it is finished, and return it.

        Its transfer stops immediately or, in another gateway, at the next lease renewal. A copy to a folder may finish.
        """
        export = await self._store.cancel(caller.tenant_id, export_id, now=self._clock.now())
        if export is None:
            raise ExportNotFound(export_id)
        self._notifier.notify()
        return export

    async def _add(self, export: Export, token: str) -> Export:
        def is_same(other: Export) -> bool:
            return other.is_same_export(export) and self._token_of(other) == token

        stored = await self._store.add_if_absent(export, is_same=is_same, max_unfinished=MAX_UNFINISHED)
        self._notifier.notify()
        return stored

    def _token_of(self, export: Export) -> str | None:
        """Return the token of an export, or None if it cannot be decrypted."""
        try:
            return self._sealer.open(export.sealed_token, purpose=export.export_id)
        except DomainError:
            return None

    def _new_export(self, caller: Caller, request: ExportRequest, digest: str) -> Export:
        now, export_id = self._clock.now(), new_id('ex')
        return Export(
            export_id=export_id,
            tenant_id=caller.tenant_id,
            request_id=request.request_id,
            checkpoint_path=request.checkpoint_path,
            digest=digest,
            target=request.target,
            is_private=request.is_private,
            sealed_token=self._sealer.seal(request.hub_token, purpose=export_id),
            create_time=now,
            update_time=now,
            due_time=now,
        )
