"""The verb that looks after what ended sessions leave behind: nothing is lost, and nothing takes up memory."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from services.gateway.paging import Cursor
from services.gateway.sessions.ports import AdapterKeeper, SessionStore
from services.gateway.sessions.session import Session, SessionState
from services.kit.errors import DomainError
from services.kit.failpoints import reach

_log = structlog.get_logger('sessions')

_PAGE_SIZE = 100
_AT_ONCE = 4
"""Sessions that are settled side by side: one that waits for a slow service holds up few others."""
_PATHS_KEPT = 1000
"""Checkpoints that a session remembers; the catalogue has them all."""
_PREFIXES = {SessionState.EXPIRED: 'session-expired', SessionState.FINISHED: 'session-ended'}

LetGo = Callable[[Session], Awaitable[None]]
"""Lets go of the versions that a session kept for sampling; raises a DomainError where it could not."""


class SettleSessions:
    """Saves and parks the adapters of sessions that have ended, and lets go of their versions.

    What fails is tried again at the next sweep. Several gateways may do the same at once: every part of it is harmless
    when it is repeated.

    No quota holds a save back: its tenant is not there to make room, and what is not saved may be lost. What is saved
    counts as any checkpoint does, so that a tenant beyond its quota saves nothing itself until it has deleted some.
    """

    def __init__(self, sessions: SessionStore, adapters: AdapterKeeper, *, let_go: LetGo) -> None:
        """Settle what `sessions` keeps: have `adapters` parked, and `let_go` of versions."""
        self._sessions = sessions
        self._adapters = adapters
        self._let_go = let_go

    async def __call__(self) -> int:
        """Go through all that are not settled; return how many are now."""
        count, after, is_end = 0, None, False
        while not is_end:
            page = await self._sessions.list_unsettled(after=after, size=_PAGE_SIZE)
            for place in range(0, len(page), _AT_ONCE):
                count += sum(await asyncio.gather(*map(self._settle, page[place : place + _AT_ONCE])))
            is_end = len(page) < _PAGE_SIZE
            after = None if is_end else Cursor(page[-1].heartbeat_time, page[-1].session_id)
        return count

    async def _settle(self, session: Session) -> bool:
        try:
            adapter_ids = await self._adapters.of_session(session.tenant_id, session.session_id)
            paths = await self._park_all(session, adapter_ids)
            # An adapter that cannot be parked, such as a damaged one, does not hold what samplers are kept for.
            if await self._is_still(session):
                await self._let_go(session)
            if paths is None:
                return False
        except DomainError as error:
            _log.warning('not settled yet', session=session.session_id, reason=error.reason, error=str(error))
            return False
        reach('session.parked')
        kept = await self._sessions.change(
            session.tenant_id, session.session_id, lambda found: found.settled(session, paths[:_PATHS_KEPT])
        )
        reach('session.settled')
        is_done = kept is not None and kept.is_settled
        if is_done:
            _log.info('session settled', session=session.session_id, adapters=len(adapter_ids), saved=len(paths))
        return is_done

    async def _park_all(self, session: Session, adapter_ids: Sequence[str]) -> list[str] | None:
        """Return where their weights are saved; None where it is not the time for all of them."""
        paths, is_complete = list[str](), True
        for adapter_id in adapter_ids:
            if not await self._is_still(session):
                return None
            try:
                prefix = _PREFIXES[session.state] if session.is_saved else ''
                parked = await self._adapters.park(session.tenant_id, adapter_id, save_prefix=prefix)
            except DomainError as error:
                # The others are looked after all the same.
                _log.warning('not parked yet', adapter=adapter_id, reason=error.reason, error=str(error))
                is_complete = False
                continue
            if parked is not None:
                is_complete &= parked.is_at_rest
                paths += [parked.checkpoint_path] if parked.checkpoint_path else []
        return paths if is_complete else None

    async def _is_still(self, session: Session) -> bool:
        """Say whether a session has not come back meanwhile, and is not settled by another gateway."""
        found = await self._sessions.get(session.tenant_id, session.session_id)
        return found is not None and found == session
