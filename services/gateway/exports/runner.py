"""Carries exports out in the background, a few at a time, until each is finished.

A gateway claims an export under a lease and renews the lease while the export runs. If the process exits, another
gateway or the next process claims the export and starts over. Sending the same files to a hub or a folder again changes
nothing, so a repeated upload has the same result.

An export that this process accepts or cancels wakes the runner. The runner polls for exports of other gateways and for
retries.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Never

import structlog

from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.config import ExportsConfig, GatewayConfig
from twinkle_services.gateway.exports.exports import ExportNotifier, Exports
from twinkle_services.gateway.exports.rules import Export, ExportState, SentFolder, parse_target, pause_after
from twinkle_services.gateway.exports.sql import SqlExportStore
from twinkle_services.gateway.exports.transfers import CheckpointArchives, ExportTargets, ReportBytes
from twinkle_services.gateway.keys.pepper import PepperedSealer, pepper_of
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError, Internal, ServiceUnreachable
from twinkle_services.kit.rpc.context import acting_for

_CLEANUP_SECONDS = 60

_log = structlog.get_logger('exports')


class ExportTransfer:
    """Transfers checkpoints from the checkpoint service to the targets of exports."""

    def __init__(self, archives: CheckpointArchives, targets: ExportTargets, sealer: PepperedSealer) -> None:
        self._archives = archives
        self._targets = targets
        self._sealer = sealer

    async def clear(self) -> None:
        await self._archives.clear()

    async def send(self, export: Export, report: ReportBytes) -> SentFolder:
        """Send the checkpoint of an export to its target, on behalf of its tenant.

        Raises:
            DomainError: the transfer failed.
            OSError: the local disk failed.
        """
        token = self._sealer.open(export.sealed_token, purpose=export.export_id)
        target, tenant_id = parse_target(export.target), export.tenant_id
        with acting_for(Caller(tenant_id=tenant_id)):
            opened = self._archives.opened(export.checkpoint_path, digest=export.digest, report=report)
            async with opened as folder:
                return await self._targets.send(
                    folder, target, tenant_id=tenant_id, token=token, is_private=export.is_private
                )


class ExportRunner:
    """Carries exports out. Concurrency: one task per process calls `run`; several processes may share a store."""

    def __init__(
        self,
        store: SqlExportStore,
        transfer: ExportTransfer,
        *,
        notifier: ExportNotifier,
        options: ExportsConfig,
        clock: Clock,
    ) -> None:
        self._store = store
        self._transfer = transfer
        self._notifier = notifier
        self._options = options
        self._clock = clock

    async def run(self) -> Never:
        """Carry exports out until cancelled. On a cancellation, running exports become due for other gateways."""
        await self._transfer.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._options.at_once):
                tasks.create_task(self._work())
            while True:
                with suppress(DomainError):
                    await self._store.delete_finished(before=self._clock.now() - self._options.keep_for)
                await asyncio.sleep(_CLEANUP_SECONDS)

    async def run_due(self) -> bool:
        """Claim one export and carry it out; return False if no export was due.

        Raises:
            DomainError: the store is unreachable.
        """
        export = await self._store.claim(self._clock.now(), lease=self._options.lease)
        if export is None:
            return False
        _log.info('export started', export=export.export_id, attempt=export.attempt_count)
        outcome = await self._carry_out(export)
        if outcome is not None and await self._store.settle(outcome):
            reason = '' if outcome.error is None else outcome.error.reason
            _log.info('export settled', export=export.export_id, state=outcome.state.value, reason=reason)
        return True

    async def _work(self) -> Never:
        while True:
            with self._notifier.waiter() as waiter:
                if not await self._try_run_due():
                    await asyncio.wait({waiter}, timeout=self._options.poll.total_seconds())

    async def _try_run_due(self) -> bool:
        try:
            return await self.run_due()
        except DomainError as error:
            _log.warning('export store unreachable', reason=error.reason)
            return False

    async def _carry_out(self, export: Export) -> Export | None:
        """Make one attempt, and return the changed export; None if the claim was lost or the export was cancelled."""
        progress = _Progress()
        task = asyncio.create_task(self._transfer.send(export, progress.report))
        try:
            while not task.done():
                with self._notifier.waiter() as waiter:
                    if not await self._renew(export, progress):
                        return None
                    await asyncio.wait(
                        {task, waiter},
                        timeout=self._options.lease.total_seconds() / 6,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
            return self._outcome(export, task, progress)
        except asyncio.CancelledError:
            due = replace(export, state=ExportState.WAITING, due_time=self._clock.now())
            # If the database is unreachable, the export becomes due when its lease expires.
            with suppress(DomainError):
                await asyncio.shield(self._store.settle(due))
            raise
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _renew(self, export: Export, progress: '_Progress') -> bool:
        now, lease = self._clock.now(), self._options.lease
        try:
            return await self._store.renew(
                export, read_bytes=progress.read_bytes, size_bytes=progress.size_bytes, now=now, lease=lease
            )
        except DomainError:
            # The lease may outlast a short outage of the database.
            return True

    def _outcome(self, export: Export, task: 'asyncio.Task[SentFolder]', progress: '_Progress') -> Export:
        now, error = self._clock.now(), task.exception()
        after = replace(export, read_bytes=progress.read_bytes, size_bytes=progress.size_bytes, update_time=now)
        if error is None:
            sent, done = task.result(), replace(after, state=ExportState.DONE, sealed_token=b'', error=None)
            return replace(done, url=sent.url, commit=sent.commit)
        if not isinstance(error, DomainError):
            _log.error('export failed unexpectedly', export=export.export_id, exc_info=error)
            # An OSError, such as a full disk or too many open files, is usually temporary.
            error = ServiceUnreachable('gateway') if isinstance(error, OSError) else Internal(export.export_id)
        if error.disposition.is_transient and export.attempt_count < self._options.attempts:
            due_time = now + pause_after(export.attempt_count)
            return replace(after, state=ExportState.WAITING, error=error, due_time=due_time)
        return replace(after, state=ExportState.FAILED, error=error, sealed_token=b'')


@dataclass
class _Progress:
    read_bytes: int = 0
    size_bytes: int = 0

    def report(self, read_bytes: int, size_bytes: int) -> None:
        self.read_bytes, self.size_bytes = read_bytes, size_bytes


def open_exports(
    config: GatewayConfig, database: Database, checkpoints: GrpcCheckpoints, *, clock: Clock
) -> tuple[Exports, ExportRunner]:
    """Return the exports in `database` and their runner, whose `run` is a background job of the gateway."""
    options = config.exports
    store, notifier, sealer = SqlExportStore(database), ExportNotifier(), PepperedSealer(pepper_of(config))
    targets = ExportTargets(root=options.folder, seconds=options.upload_time.total_seconds())
    transfer = ExportTransfer(CheckpointArchives(checkpoints, root=config.state_dir / 'exports'), targets, sealer)
    exports = Exports(store, checkpoints, targets, sealer=sealer, notifier=notifier, clock=clock)
    return exports, ExportRunner(store, transfer, notifier=notifier, options=options, clock=clock)
