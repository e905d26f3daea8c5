"""Puts a gateway together and runs it: `python -m services.gateway --config FILE`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway.api.authenticator import KeyAuthenticator
from services.gateway.api.catalogue_servicer import CatalogueServicer
from services.gateway.api.endpoints import FORWARDED, make_endpoints
from services.gateway.api.forwarding import Forwarder, open_forwarding_channel
from services.gateway.api.key_servicer import KeyServicer
from services.gateway.api.server_info import MergedServerInfoServicer
from services.gateway.api.session_servicer import SessionServicer
from services.gateway.application.create_key import CreateKey
from services.gateway.application.create_session import CreateSession
from services.gateway.application.create_tenant import CreateTenant
from services.gateway.application.expire_sessions import ExpireSessions
from services.gateway.application.finish_session import FinishSession
from services.gateway.application.follow_catalogue import FollowCatalogue
from services.gateway.application.get_run import GetRun
from services.gateway.application.get_session import GetSession
from services.gateway.application.heartbeat import Heartbeat
from services.gateway.application.install_bootstrap_key import InstallBootstrapKey
from services.gateway.application.list_keys import ListKeys
from services.gateway.application.list_run_checkpoints import ListRunCheckpoints
from services.gateway.application.list_runs import ListRuns
from services.gateway.application.list_sessions import ListSessions
from services.gateway.application.list_tenants import ListTenants
from services.gateway.application.revoke_key import RevokeKey
from services.gateway.application.verify_key import VerifyKey
from services.gateway.backends.grpc_feeds import GrpcCheckpointFeed, GrpcRunFeed
from services.gateway.backends.peppered_hasher import PepperedHasher, load_pepper
from services.gateway.backends.sql import (
    Database,
    SqlCheckpointStore,
    SqlKeyStore,
    SqlRunStore,
    SqlSessionStore,
    SqlTenantStore,
)
from services.gateway.backends.upstream_facts import GrpcUpstreamFacts
from services.gateway.config import GatewayConfig
from services.kit.clock import Clock, SystemClock
from services.kit.config import load_config
from services.kit.rpc.channel import open_channel
from services.kit.rpc.server import RpcServer, serve_until_stopped
from services.kit.telemetry import start_telemetry, stop_telemetry


@dataclass(frozen=True)
class Gateway:
    """A gateway, put together."""

    server: RpcServer
    """Not started."""
    jobs: tuple[Callable[[], Coroutine[Any, Any, Any]], ...]
    """To be run beside the server, until it stops."""


@asynccontextmanager
async def assembled(config: GatewayConfig, *, clock: Clock) -> AsyncIterator[Gateway]:
    """Open what a gateway needs, put it together, and close everything at the end."""
    async with AsyncExitStack() as stack:
        database = await Database.open(config.database_address())
        stack.push_async_callback(database.close)
        keys = SqlKeyStore(database)
        tenants = SqlTenantStore(database)
        hasher = PepperedHasher(bytes.fromhex(config.key_pepper) or load_pepper(config.pepper_file()))
        verify = VerifyKey(keys, hasher=hasher, clock=clock, memory=config.key_memory)
        await InstallBootstrapKey(tenants, keys, hasher=hasher, clock=clock)(config.bootstrap_key)
        key_servicer = KeyServicer(
            create_tenant=CreateTenant(tenants, clock=clock),
            list_tenants=ListTenants(tenants),
            create_key=CreateKey(tenants, keys, hasher=hasher, clock=clock),
            list_keys=ListKeys(tenants, keys),
            revoke_key=RevokeKey(keys, verify=verify, clock=clock),
        )
        upstreams = await _open_upstreams(config, stack)
        server = _server(config, database, verify=verify, keys=key_servicer, upstreams=upstreams, clock=clock)
        expire = ExpireSessions(SqlSessionStore(database), lifetime=config.session_lifetime, clock=clock)
        yield Gateway(
            server,
            (
                lambda: expire.keep_on(interval=config.heartbeat_interval),
                *_catalogue_jobs(database, upstreams, clock=clock),
            ),
        )


@dataclass(frozen=True)
class _Upstreams:
    """Channels to the services behind the gateway, by service."""

    forwarding: dict[str, grpc.aio.Channel]
    """For clients' calls."""
    own: dict[str, grpc.aio.Channel]
    """For the gateway's own calls."""


async def _open_upstreams(config: GatewayConfig, stack: AsyncExitStack) -> _Upstreams:
    upstreams = _Upstreams({}, {})
    for service, address in config.upstreams.addresses().items():
        upstreams.forwarding[service] = await stack.enter_async_context(open_forwarding_channel(address))
        upstreams.own[service] = await stack.enter_async_context(
            open_channel(address, internal_token=config.internal_token)
        )
    return upstreams


def _server(
    config: GatewayConfig,
    database: Database,
    *,
    verify: VerifyKey,
    keys: KeyServicer,
    upstreams: _Upstreams,
    clock: Clock,
) -> RpcServer:
    sessions = SqlSessionStore(database)
    runs = SqlRunStore(database)
    session_servicer = SessionServicer(
        create=CreateSession(sessions, clock=clock),
        heartbeat=Heartbeat(sessions, clock=clock),
        get=GetSession(sessions, lifetime=config.session_lifetime, clock=clock),
        list_sessions=ListSessions(sessions, lifetime=config.session_lifetime, clock=clock),
        finish=FinishSession(sessions),
        heartbeat_interval=config.heartbeat_interval,
    )
    catalogue_servicer = CatalogueServicer(  # pyright: ignore[reportAbstractUsage] (the rest is not built yet)
        get_run=GetRun(runs),
        list_runs=ListRuns(runs),
        list_run_checkpoints=ListRunCheckpoints(SqlCheckpointStore(database)),
    )
    forwarder = Forwarder(FORWARDED, channels=upstreams.forwarding, internal_token=config.internal_token)
    facts = [
        GrpcUpstreamFacts(
            service, channel=upstreams.own.get(service), clock=clock, freshness=config.server_info_freshness
        )
        for service in FORWARDED
    ]
    server = RpcServer(
        config,
        authenticator=KeyAuthenticator(verify),
        endpoints=make_endpoints(keys=keys, sessions=session_servicer, catalogue=catalogue_servicer),
        generic_handlers={forwarder: forwarder.methods},
        server_info=MergedServerInfoServicer(own=lambda: server.describe(), upstreams=facts),  # noqa: PLW0108 (made after it)
    )
    return server


def _catalogue_jobs(
    database: Database, upstreams: _Upstreams, *, clock: Clock
) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
    jobs: list[Callable[[], Coroutine[Any, Any, Any]]] = []
    if channel := upstreams.own.get('model'):
        runs = FollowCatalogue('runs', feed=GrpcRunFeed(channel), shelf=SqlRunStore(database), clock=clock)
        jobs.append(runs.__call__)
    if channel := upstreams.own.get('checkpoint'):
        checkpoints = FollowCatalogue(
            'checkpoints',
            feed=GrpcCheckpointFeed(channel),
            shelf=SqlCheckpointStore(database),
            clock=clock,
        )
        jobs.append(checkpoints.__call__)
    return jobs


async def run(config: GatewayConfig) -> None:
    """Serve until asked to stop."""
    async with assembled(config, clock=SystemClock()) as gateway, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(job()) for job in gateway.jobs]
        await serve_until_stopped(gateway.server, config)
        for task in running:
            task.cancel()


def main() -> None:
    """Run a gateway as the command line says."""
    config = load_config(GatewayConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        asyncio.run(run(config))
    finally:
        stop_telemetry()


if __name__ == '__main__':
    main()
