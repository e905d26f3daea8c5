"""Carries exports out, one after the other in a few lanes, until each is over.

An export is claimed for a while at a time, and the claim is lengthened while the work goes on. Where this process ends,
another one, or its successor, claims it again and begins anew: what a hub or a folder has already, it takes without a
change, so that there is one result.

What is accepted or cancelled at this gateway is heard at once. What is left by others, and what is tried again, is
found by looking from time to time.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Never

import structlog

from services.gateway.exports.export_world import ExportWorld
from services.gateway.exports.ports import Sent
from services.gateway.exports.rules import Export, ExportState, parse_target, pause_after
from services.kit.caller import Caller
from services.kit.errors import DomainError, Internal, ServiceUnreachable

_FORGET_SECONDS = 60

_log = structlog.get_logger('exports')


@dataclass(frozen=True, kw_only=True)
class ExportLimits:
    """How exports are carried out."""

    at_once: int
    attempts: int
    """Tries before an export has failed."""
    lease: timedelta
    """Silence after which another gateway takes an export over."""
    poll: timedelta
    """How often what others left, or what waits for another try, is looked for."""
    keep_for: timedelta
    """How long an export is known that is over."""


class RunExports:
    """Carries exports out. Concurrency: one per process runs `keep_on`; several processes may share a store."""

    def __init__(self, world: ExportWorld, limits: ExportLimits) -> None:
        """Carry out what `world` keeps."""
        self._world = world
        self._limits = limits

    async def keep_on(self) -> Never:
        """Work until cancelled; what is under way then is due again at once."""
        await self._world.archives.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._limits.at_once):
                tasks.create_task(self._work())
            while True:
                with suppress(DomainError):
                    await self._world.store.forget(before=self._world.clock.now() - self._limits.keep_for)
                await asyncio.sleep(_FORGET_SECONDS)

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
            with self._world.news.heard() as news:
                if not await self._has_run():
                    await asyncio.wait({news}, timeout=self._limits.poll.total_seconds())

    async def _has_run(self) -> bool:
        try:
            return await self.run_due()
        except DomainError as error:
            _log.warning('exports wait', reason=error.reason)
            return False

    async def _carry_out(self, export: Export) -> Export | None:
        """Return the export as it is after a try; None: it is no longer this process's."""
        progress = _Progress()
        task = asyncio.create_task(self._send(export, progress))
        try:
            while not task.done():
                with self._world.news.heard() as news:
                    if not await self._keep(export, progress):
                        return None
                    await asyncio.wait(
                        {task, news},
                        timeout=self._limits.lease.total_seconds() / 6,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
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
        target, tenant_id = parse_target(export.target), export.tenant_id
        with world.acting_for(Caller(tenant_id=tenant_id)):
            opened = world.archives.opened(export.checkpoint_path, digest=export.digest, report=progress.report)
            async with opened as folder:
                return await world.destination.send(
                    folder, target, tenant_id=tenant_id, token=token, is_private=export.is_private
                )

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
        if error.disposition.is_transient and export.attempt_count < self._limits.attempts:
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
