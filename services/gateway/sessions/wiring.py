"""Puts together what looks after sessions whose clients are gone."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from services.gateway.config import GatewayConfig
from services.gateway.sampling.handles import SamplingHandles
from services.gateway.sessions.expire_sessions import ExpireSessions
from services.gateway.sessions.grpc import GrpcAdapters
from services.gateway.sessions.session import Session
from services.gateway.sessions.settle_sessions import SettleSessions
from services.gateway.sessions.sql import SqlSessionStore
from services.gateway.store.database import Database
from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.rpc.context import acting_for


def session_job(
    config: GatewayConfig,
    database: Database,
    *,
    models: Sequence[grpc.aio.Channel],
    handles: SamplingHandles,
    clock: Clock,
) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Return what runs until the gateway stops: it ends sessions whose clients are silent, and settles them.

    Args:
        config: of the gateway.
        database: keeps them.
        models: a bare channel to each model service.
        handles: keep versions to sample from.
        clock: tells the time.
    """
    sessions = SqlSessionStore(database)

    async def let_go(session: Session) -> None:
        with acting_for(Caller(tenant_id=session.tenant_id, scopes=frozenset({'train'}))):
            await handles.unpin_session(session.session_id)

    adapters = GrpcAdapters(models, internal_token=config.internal_token)
    settle = SettleSessions(sessions, adapters, let_go=let_go)
    expire = ExpireSessions(sessions, lifetime=config.session_lifetime, clock=clock, settle=settle)
    return lambda: expire.keep_on(interval=config.heartbeat_interval)
