"""Carries exports out, one after the other in a few lanes, until each is over.

An export is claimed for a while at a time, and the claim is lengthened while the work goes on. Where this process ends,
another one, or its successor, claims it again and begins anew: what a hub or a folder has already, it takes without a
change, so that there is one result.
"""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Never

import structlog

from services.gateway.domain.export import Export, ExportState, parse_target, pause_after
from services.gateway.ports.exports import ArchiveSource, Destination, ExportStore, Sealer, Sent
from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.errors import Code, DomainError, Internal, ServiceUnreachable

_AGAIN = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.DATA_LOSS, Code.ABORTED})
"""Codes of what another try may cure."""

_log = structlog.get_logger('exports')


@dataclass(frozen=True, kw_only=True)
class ExportLimits:
    """How exports are carried out."""

    folder: Path
    """Where archives lie while they are sent; holds nothing else."""
    at_once: int
    attempts: int
    """Tries before an export has failed."""
    lease: timedelta
    """Silence after which another gateway takes an export over."""
    poll: timedelta
    """How often what is due is looked for."""
    keep_for: timedelta
    """How long an export is known that is over."""


@dataclass(frozen=True, kw_only=True)
class ExportWorld:
    """What exports are carried out with."""

    store: ExportStore
    archives: ArchiveSource
    destination: Destination
    sealer: Sealer
    acting_for: Callable[[Caller], AbstractContextManager[None]]
    """Makes a caller the current one during a block."""
    clock: Clock


class RunExports:
    """Carries exports out. Concurrency: one per process runs `keep_on`; several processes may share a store."""

    def __init__(self, world: ExportWorld, limits: ExportLimits) -> None:
        """Carry out what `world` keeps."""
        self._world = world
        self._limits = limits

    async def keep_on(self) -> Never:
        """Work until cancelled; what is under way then is due again at once."""
        await asyncio.to_thread(shutil.rmtree, self._limits.folder, ignore_errors=True)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._limits.at_once):
                tasks.create_task(self._work())
            while True:
                with suppress(DomainError):
                    await self._world.store.forget(before=self._world.clock.now() - self._limits.keep_for)
                await asyncio.sleep(60)

    async def run_due(self) -> bool:
        """Claim one export and carry it out; False: none was due.

        Raises:
            DomainError: the store does not answer.
        """
        export = await self._world.store.claim(self._world.clock.now(), lease=self._limits.lease)
        if export is None:
            return False
        _log.info('export begun', export=export.export_id, attempt=export.attempt_count)
        outcome = await self._carry_out(export)
        if outcome is not None and await self._world.store.settle(outcome):
            reason = '' if outcome.error is None else outcome.error.reason
            _log.info('export settled', export=export.export_id, state=outcome.state.value, reason=reason)
        return True

    async def _work(self) -> Never:
        while True:
            try:
                was_busy = await self.run_due()
            except DomainError as error:
                _log.warning('exports wait', reason=error.reason)
                was_busy = False
            if not was_busy:
                await asyncio.sleep(self._limits.poll.total_seconds())

    async def _carry_out(self, export: Export) -> Export | None:
        """Return the export as it is after a try; None: it is no longer this process's."""
        progress = _Progress()
        task = asyncio.create_task(self._send(export, progress))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self._limits.lease.total_seconds() / 6)
                if not await self._keep(export, progress):
                    return None
            return self._outcome(export, task, progress)
        except asyncio.CancelledError:
            due = replace(export, state=ExportState.WAITING, due_time=self._world.clock.now())
            # Where the database is away, its lease ends by itself.
            with suppress(DomainError):
                await asyncio.shield(self._world.store.settle(due))
            raise
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep(self, export: Export, progress: '_Progress') -> bool:
        now, lease = self._world.clock.now(), self._limits.lease
        try:
            return await self._world.store.keep(
                export, read_bytes=progress.read_bytes, size_bytes=progress.size_bytes, now=now, lease=lease
            )
        except DomainError:
            # The database is away for a moment; the lease may last longer.
            return True

    async def _send(self, export: Export, progress: '_Progress') -> Sent:
        world = self._world
        token = world.sealer.open(export.sealed_token, purpose=export.export_id)
        folder = self._limits.folder / f'{export.export_id}-{export.attempt_count}'
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        try:
            with world.acting_for(Caller(tenant_id=export.tenant_id)):
                path, digest = export.checkpoint_path, export.digest
                await world.archives.fetch(path, folder, digest=digest, report=progress.report)
            target, tenant_id = parse_target(export.target), export.tenant_id
            return await world.destination.send(
                folder, target, tenant_id=tenant_id, token=token, is_private=export.is_private
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _outcome(self, export: Export, task: 'asyncio.Task[Sent]', progress: '_Progress') -> Export:
        now = self._world.clock.now()
        error = task.exception()
        told = replace(export, read_bytes=progress.read_bytes, size_bytes=progress.size_bytes, update_time=now)
        if error is None:
            sent = task.result()
            done = {'url': sent.url, 'commit': sent.commit, 'sealed_token': b'', 'error': None}
            return replace(told, state=ExportState.DONE, **done)
        if not isinstance(error, DomainError):
            _log.error('export broke', export=export.export_id, exc_info=error)
            # A full disk, or too many open files: of this machine now, and seldom for ever.
            error = ServiceUnreachable('gateway') if isinstance(error, OSError) else Internal(export.export_id)
        if error.code in _AGAIN and export.attempt_count < self._limits.attempts:
            due_time = now + pause_after(export.attempt_count)
            return replace(told, state=ExportState.WAITING, error=error, due_time=due_time)
        return replace(told, state=ExportState.FAILED, error=error, sealed_token=b'')


class _Progress:
    """How far a try is."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.size_bytes = 0

    def report(self, read_bytes: int, size_bytes: int) -> None:
        """Note it."""
        self.read_bytes, self.size_bytes = read_bytes, size_bytes
