"""Marks sessions without heartbeats as expired, and settles ended sessions so that no training is lost."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Never

import grpc
import structlog

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.paging import Cursor
from twinkle_services.gateway.sessions.grpc import GrpcAdapters
from twinkle_services.gateway.sessions.rules import Session, SessionState
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.rpc.context import acting_for

_log = structlog.get_logger('sessions')

_PAGE_SIZE = 100
_CONCURRENCY = 16
"""Maximum number of sessions that are settled at the same time, at most one per tenant."""
_MAX_RECORDED_PATHS = 1000
"""Maximum number of checkpoint paths stored with a session. The catalogue lists all checkpoints."""
Job = Callable[[], Coroutine[Any, Any, Any]]
"""Returns the coroutine of a background task, which runs until it is cancelled."""
SessionCall = Callable[[str], Awaitable[None]]
"""Call for a session of the current caller's tenant, by id. If it raises a DomainError, the next sweep repeats it."""
_PREFIXES = {SessionState.EXPIRED: 'session-expired', SessionState.FINISHED: 'session-ended'}


class SessionSettler:
    """Drops the work of ended sessions, saves and parks their adapters, and unpins the versions that they sample from.

    If the client finished the session with success, the adapters are not saved. The next sweep repeats failed work.
    Several gateways may settle the same session at the same time, because every step can be repeated safely.

    Quotas do not apply to these saves, because a refused save would lose training steps. The checkpoints count
    as usual, so a tenant above its quota must delete some checkpoints before it can save again.
    """

    def __init__(
        self, sessions: SqlSessionStore, adapters: GrpcAdapters, *, drop_work: SessionCall, unpin: SessionCall
    ) -> None:
        self._sessions = sessions
        self._adapters = adapters
        self._drop_work = drop_work
        self._unpin = unpin
        self._slots = asyncio.Semaphore(_CONCURRENCY)
        self._workers: dict[str, asyncio.Task[int]] = {}
        """Tasks in progress by tenant; each settles all sessions of its tenant that were found."""

    async def start(self) -> Sequence[asyncio.Task[int]]:
        """Start to settle the ended sessions of each tenant, except tenants whose earlier task is still running.

        Returns:
            One task for each started tenant. The result of a task is the number of sessions that it settled.
        """
        waiting: dict[str, list[str]] = {}
        after, is_last = None, False
        while not is_last:
            page = await self._sessions.list_unsettled(after=after, size=_PAGE_SIZE)
            for session in page:
                waiting.setdefault(session.tenant_id, []).append(session.session_id)
            is_last = len(page) < _PAGE_SIZE
            after = None if is_last else Cursor(page[-1].heartbeat_time, page[-1].session_id)
        return [self._start_tenant(*item) for item in waiting.items() if item[0] not in self._workers]

    async def close(self) -> None:
        """Cancel all tasks; the next sweep of any gateway repeats their work."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    def _start_tenant(self, tenant_id: str, session_ids: Sequence[str]) -> asyncio.Task[int]:
        worker = asyncio.create_task(self._settle_tenant(tenant_id, session_ids), name=f'settle-{tenant_id}')
        self._workers[tenant_id] = worker
        worker.add_done_callback(lambda _: self._workers.pop(tenant_id))
        return worker

    async def _settle_tenant(self, tenant_id: str, session_ids: Sequence[str]) -> int:
        """Settle a tenant's sessions one after the other, so that many sessions do not delay other tenants."""
        count = 0
        for session_id in session_ids:
            async with self._slots:
                try:
                    session = await self._sessions.get(tenant_id, session_id)
                    count += session is not None and session.is_unsettled and await self._settle(session)
                except DomainError as error:
                    _log.warning('session not settled', session=session_id, reason=error.reason, error=str(error))
        return count

    async def _settle(self, session: Session) -> bool:
        try:
            await self._call_if_unchanged(self._drop_work, session)
            adapter_ids = await self._adapters.of_session(session.tenant_id, session.session_id)
            paths = await self._park_all(session, adapter_ids)
            # Versions are unpinned even if an adapter cannot be parked, for example because it is damaged.
            await self._call_if_unchanged(self._unpin, session)
            if paths is None:
                return False
        except DomainError as error:
            _log.warning('session not settled', session=session.session_id, reason=error.reason, error=str(error))
            return False
        reach('session.parked')
        stored = await self._sessions.change(
            session.tenant_id, session.session_id, lambda found: found.settled(session, paths[:_MAX_RECORDED_PATHS])
        )
        reach('session.settled')
        is_settled = stored is not None and stored.is_settled
        if is_settled:
            _log.info('session settled', session=session.session_id, adapters=len(adapter_ids), saved=len(paths))
        return is_settled

    async def _call_if_unchanged(self, call: SessionCall, session: Session) -> None:
        if await self._is_unchanged(session):
            with acting_for(Caller(tenant_id=session.tenant_id, scopes=frozenset({'train'}))):
                await call(session.session_id)

    async def _park_all(self, session: Session, adapter_ids: Sequence[str]) -> list[str] | None:
        """Park the adapters; return the paths of their checkpoints, or None if the session must be settled again."""
        paths, is_complete = list[str](), True
        for adapter_id in adapter_ids:
            if not await self._is_unchanged(session):
                return None
            try:
                prefix = _PREFIXES[session.state] if session.is_saved else ''
                parked = await self._adapters.park(session.tenant_id, adapter_id, save_prefix=prefix)
            except DomainError as error:
                # One failure does not prevent the parking of the other adapters.
                _log.warning('adapter not parked', adapter=adapter_id, reason=error.reason, error=str(error))
                is_complete = False
                continue
            if parked is not None:
                is_complete &= parked.is_idle
                paths += [parked.checkpoint_path] if parked.checkpoint_path else []
        return paths if is_complete else None

    async def _is_unchanged(self, session: Session) -> bool:
        """Return whether the stored session still equals `session`; a heartbeat or another gateway may change it."""
        return await self._sessions.get(session.tenant_id, session.session_id) == session


class SessionSweep:
    """Expires sessions that had no heartbeat for longer than `lifetime`, and settles ended ones."""

    def __init__(
        self, sessions: SqlSessionStore, settler: SessionSettler, *, lifetime: timedelta, clock: Clock
    ) -> None:
        self._sessions = sessions
        self._settler = settler
        self._lifetime = lifetime
        self._clock = clock

    async def expire(self) -> int:
        """Mark sessions without a heartbeat within `lifetime` as expired; return their number."""
        return await self._sessions.expire(silent_since=self._clock.now() - self._lifetime)

    async def run(self, *, interval: timedelta, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Never:
        """Sweep every `interval` until cancelled. The next sweep completes a failed one.

        No session is marked as expired within `lifetime` after the start, because clients could not send heartbeats
        while the gateway was stopped.
        """
        begin = self._clock.now()
        try:
            while True:
                await pause(interval.total_seconds())
                await self._sweep(is_expiring=self._clock.now() - begin >= self._lifetime, patience=interval)
        finally:
            await self._settler.close()

    async def _sweep(self, *, is_expiring: bool, patience: timedelta) -> None:
        """Expire and settle sessions once; settlements that take longer than `patience` continue in the background."""
        try:
            if is_expiring and (count := await self.expire()):
                _log.info('sessions expired', count=count)
                reach('session.expired')
            if workers := await self._settler.start():
                done, _ = await asyncio.wait(workers, timeout=patience.total_seconds())
                for worker in done:
                    worker.result()
        except DomainError as error:
            _log.warning('session sweep failed', reason=error.reason)


def session_job(
    config: GatewayConfig,
    database: Database,
    models: Mapping[str, grpc.aio.Channel],
    *,
    drop_work: SessionCall,
    unpin: SessionCall,
    clock: Clock,
) -> Job:
    """Return the background job that expires and settles sessions."""
    store = SqlSessionStore(database)
    adapters = GrpcAdapters(tuple(models.values()), internal_token=config.internal_token)
    settler = SessionSettler(store, adapters, drop_work=drop_work, unpin=unpin)
    sweep = SessionSweep(store, settler, lifetime=config.session_lifetime, clock=clock)
    return lambda: sweep.run(interval=config.heartbeat_interval)
