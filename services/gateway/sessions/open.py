"""Wires sessions to a database, and creates the background job that expires and settles them."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import grpc

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.keys.tenants import Projects
from twinkle_services.gateway.sessions.grpc import GrpcAdapters
from twinkle_services.gateway.sessions.sessions import Sessions
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.sessions.sweep import SessionCall, SessionSettler, SessionSweep
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import Clock


def open_sessions(config: GatewayConfig, database: Database, projects: Projects, *, clock: Clock) -> Sessions:
    """Return the operations on the sessions in `database`."""
    store, interval = SqlSessionStore(database), config.heartbeat_interval
    return Sessions(store, projects, lifetime=config.session_lifetime, heartbeat_interval=interval, clock=clock)


def session_job(
    config: GatewayConfig,
    database: Database,
    models: Mapping[str, grpc.aio.Channel],
    *,
    drop_work: SessionCall,
    unpin: SessionCall,
    clock: Clock,
) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Return the background job that expires and settles sessions."""
    store = SqlSessionStore(database)
    adapters = GrpcAdapters(tuple(models.values()), internal_token=config.internal_token)
    settler = SessionSettler(store, adapters, drop_work=drop_work, unpin=unpin)
    sweep = SessionSweep(store, settler, lifetime=config.session_lifetime, clock=clock)
    return lambda: sweep.run(interval=config.heartbeat_interval)
