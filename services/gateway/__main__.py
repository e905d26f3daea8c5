"""Assembles a gateway and runs it: `python -m twinkle_services.gateway --config FILE`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass

import grpc

from twinkle_services.gateway.catalogue.checkpoints import Catalogue, open_catalogue
from twinkle_services.gateway.catalogue.follow import Purge, checkpoint_jobs
from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.catalogue.sql import SqlEndedRows
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.console.routes import open_console
from twinkle_services.gateway.errors import StoredRowDamaged
from twinkle_services.gateway.exports.runner import open_exports
from twinkle_services.gateway.fleet.open import fleet_jobs, open_fleet, open_replicas, open_upstreams, upstream_jobs
from twinkle_services.gateway.fleet.upstreams import ServiceFacts, Upstreams
from twinkle_services.gateway.forwarding.open import (
    MergedServerInfoServicer,
    make_endpoints,
    open_forwarding,
    record_endpoints,
    trace_endpoint,
)
from twinkle_services.gateway.futures.futures import Futures
from twinkle_services.gateway.futures.grpc import GrpcTrainer
from twinkle_services.gateway.futures.open import FutureService, open_futures, open_handles
from twinkle_services.gateway.http.server import HttpServer, open_http
from twinkle_services.gateway.keys.authenticator import GatewayAuthenticator, KeyAuthenticator
from twinkle_services.gateway.keys.keys import Accounts, open_keys
from twinkle_services.gateway.keys.pepper import PepperUnusable
from twinkle_services.gateway.keys.tenants import Tenants
from twinkle_services.gateway.metrics.metrics import open_metrics
from twinkle_services.gateway.metrics.sql import SqlEndedMetrics
from twinkle_services.gateway.openai.models import FleetSamplers
from twinkle_services.gateway.openai.routes import open_openai
from twinkle_services.gateway.quotas.grpc import reading_of
from twinkle_services.gateway.quotas.quotas import Quotas, open_quotas, quota_jobs
from twinkle_services.gateway.quotas.sql import SqlEndedUsage
from twinkle_services.gateway.rollouts.rollouts import Rollouts
from twinkle_services.gateway.rollouts.sql import SqlEndedRollouts, SqlRolloutStore
from twinkle_services.gateway.sampling.sampling import open_sampling
from twinkle_services.gateway.sampling.sql import SqlHandleStore
from twinkle_services.gateway.sessions.sessions import open_sessions
from twinkle_services.gateway.sessions.sweep import Job, session_job
from twinkle_services.gateway.store.database import Database
from twinkle_services.gateway.store.migrations import SchemaNotSupported
from twinkle_services.gateway.tinker.open import open_tinker, open_tinker_catalogue
from twinkle_services.kit.clock import Clock, SystemClock
from twinkle_services.kit.config import keep_files_private, load_config
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.server import Endpoint, RpcServer, serve_until_stopped, write_address_file
from twinkle_services.kit.rpc.service_ports import opened_ports
from twinkle_services.kit.sqlite_seals import DatabaseDamaged
from twinkle_services.kit.telemetry import Readiness, serving_admin, start_telemetry, stop_telemetry
from twinkle_services.kit.telemetry.event_loop import run_service

_ENDED = (SqlEndedRows, SqlHandleStore, SqlEndedUsage, SqlEndedMetrics, SqlEndedRollouts)
"""Stores from which old rows are removed, in this order."""


@dataclass(frozen=True)
class Gateway:
    """An assembled gateway, not started."""

    server: RpcServer
    jobs: Sequence[Job]
    """Background tasks that run until the server stops."""
    futures: Futures
    http: HttpServer | None = None
    """Server of the HTTP APIs; None if they are disabled."""


@asynccontextmanager
async def assembled(config: GatewayConfig, *, clock: Clock) -> AsyncIterator[Gateway]:
    """Open the features of a gateway in the order of their dependencies, and close them at the end of the block."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(_opened_database(config))
        accounts = await open_keys(config, database, clock=clock)
        sessions = open_sessions(config, database, accounts.projects, clock=clock)
        upstreams = await open_upstreams(config, database, stack, clock=clock)
        quotas = await stack.enter_async_context(_quotas(config, database, accounts.tenants, upstreams, clock=clock))
        catalogue = open_catalogue(database, _checkpoint_client(config, upstreams, quotas), clock=clock)
        fleet, channels, samplers = await open_fleet(config, stack, clock=clock)
        sampling = open_sampling(config, fleet, channels, lookups=upstreams.lookups, quotas=quotas)
        exports, export_runner = open_exports(config, database, catalogue.client, clock=clock)
        trainer, lookups = _trainer(config, upstreams, quotas), upstreams.lookups
        opening = open_futures(config, database, trainer=trainer, sampling=sampling, quotas=quotas, clock=clock)
        futures, future_jobs = await stack.enter_async_context(opening)
        handles = open_handles(database, futures, sampling=sampling, lookups=lookups, quotas=quotas, clock=clock)
        replicas = open_replicas(config, fleet)
        records = _records(config, database, catalogue, upstreams, quotas, clock=clock)
        record_servers, record_jobs, end_watches = await stack.enter_async_context(records)
        endpoints = make_endpoints(accounts, sessions, catalogue, quotas, exports=exports, replicas=replicas)
        handlers = open_forwarding(config, upstreams, quotas.training, sampling=sampling)
        endpoints, facts = [*endpoints, *record_servers], upstreams.all_facts(samplers)
        server = _server(config, accounts, endpoints, handlers=handlers, facts=facts)
        server.on_drain(fleet.close, futures.begin_stop, end_watches)
        chat, service = FleetSamplers(sampling, fleet, describe=samplers.describe), FutureService(futures, handles)
        routes = [
            *open_openai(config, chat, catalogue.runs, lookups, clock=clock),
            *open_tinker(config, database, sessions=sessions, service=service, upstreams=upstreams, samplers=samplers),
            *open_console(config, server, accounts.verifier, stack, checkpoints=catalogue.client, clock=clock),
            *open_tinker_catalogue(database, catalogue, accounts, sessions, upstreams=upstreams, clock=clock),
        ]
        http = open_http(config, authenticator=KeyAuthenticator(accounts.verifier), routes=routes)
        own_jobs = [*record_jobs, *future_jobs, export_runner.run, _purge(database, clock=clock).run]
        drop_work, unpin = futures.drop_session, handles.unpin_session
        jobs = [
            session_job(config, database, upstreams.models, drop_work=drop_work, unpin=unpin, clock=clock),
            *upstream_jobs(config, database, upstreams, meters=(reading_of, quotas.meter), clock=clock),
            *checkpoint_jobs(database, upstreams.internal.get('checkpoint'), clock=clock),
            *fleet_jobs(config, fleet, channels, sampler=upstreams.internal.get('sampler')),
            *quota_jobs(config.quotas, quotas),
        ]
        yield Gateway(server, [*jobs, *own_jobs], futures, http)


@asynccontextmanager
async def _opened_database(config: GatewayConfig) -> AsyncIterator[Database]:
    database = await Database.open(config.database_address(), is_loss_accepted=config.accept_data_loss)
    try:
        yield database
    finally:
        await database.close()


def _server(
    config: GatewayConfig,
    accounts: Accounts,
    endpoints: Sequence[Endpoint],
    *,
    handlers: Mapping[grpc.GenericRpcHandler, Mapping[str, bool]],
    facts: Sequence[ServiceFacts],
) -> RpcServer:
    server = RpcServer(
        config,
        authenticator=GatewayAuthenticator(
            KeyAuthenticator(accounts.verifier),
            InternalAuthenticator(config.internal_token),
            internal_token=config.internal_token,
            is_open=config.is_on_loopback(),
        ),
        endpoints=[*endpoints, trace_endpoint(config)],
        generic_handlers=handlers,
        server_info=MergedServerInfoServicer(own=lambda: server.describe(), upstreams=facts),  # noqa: PLW0108 (defined later)
    )
    return server


def _quotas(
    config: GatewayConfig, database: Database, tenants: Tenants, upstreams: Upstreams, *, clock: Clock
) -> AbstractAsyncContextManager[Quotas]:
    return open_quotas(config, database, tenants, upstreams.models, data=upstreams.channels.get('data'), clock=clock)


def _checkpoint_client(config: GatewayConfig, upstreams: Upstreams, quotas: Quotas) -> GrpcCheckpoints:
    channel, check_storage = upstreams.channels.get('checkpoint'), quotas.training.check_storage
    return GrpcCheckpoints(channel, internal_token=config.internal_token, check_storage=check_storage)


def _trainer(config: GatewayConfig, upstreams: Upstreams, quotas: Quotas) -> GrpcTrainer | None:
    if upstreams.calls is None:
        return None
    return GrpcTrainer(upstreams.calls, quotas.training, internal_token=config.internal_token)


@asynccontextmanager
async def _records(
    config: GatewayConfig,
    database: Database,
    catalogue: Catalogue,
    upstreams: Upstreams,
    quotas: Quotas,
    *,
    clock: Clock,
) -> AsyncIterator[tuple[list[Endpoint], list[Job], Callable[[], None]]]:
    """Open the metrics and rollouts of runs; yield their endpoints and jobs, and the function that ends watches."""
    runs, max_bytes = catalogue.runs, config.rollout_bytes_per_run
    opened = open_metrics(
        database,
        runs,
        upstreams.internal_models,
        clock=clock,
        max_points=config.metric_points_per_run,
        quota_of=lambda tenant_id: quotas.table.of(tenant_id).metric_points,
    )
    async with opened as (metrics, watches, jobs):
        with closing(SqlRolloutStore(database)) as store:
            rollouts = Rollouts(store, runs, clock=clock, max_bytes=max_bytes)
            yield record_endpoints(metrics, watches, rollouts), jobs, watches.close


def _purge(database: Database, *, clock: Clock) -> Purge:
    return Purge([store(database) for store in _ENDED], clock=clock)


@asynccontextmanager
async def _serving_http(gateway: Gateway, config: GatewayConfig) -> AsyncIterator[None]:
    """Serve the HTTP APIs during the block. They drain when the gRPC server drains.

    Raises:
        SystemExit: the gateway cannot listen on the address; the message names the setting.
    """
    if gateway.http is None:
        yield
        return
    try:
        await gateway.http.start(grpc_ports=lambda: gateway.server.ports)
    except OSError as error:
        text = f'http_listen: cannot serve on {config.http_listen}; give a free HOST:PORT of this machine'
        raise SystemExit(f'{config.service}: {text}') from error
    if config.http_address_file is not None:
        write_address_file(config.http_address_file, service='gateway-http', address=gateway.http.address)
    gateway.server.on_drain(gateway.http.begin_stop)
    try:
        yield
    finally:
        await gateway.http.stop()


async def run(config: GatewayConfig, readiness: Readiness) -> None:
    """Serve requests until the process receives SIGINT or SIGTERM."""
    async with AsyncExitStack() as stack:
        ports = await stack.enter_async_context(opened_ports(config, readiness))
        with readiness.step('read the database'):
            gateway = await stack.enter_async_context(assembled(config, clock=SystemClock()))
        gateway.server.use_ports(ports)
        await _serve(gateway, config)


async def _serve(gateway: Gateway, config: GatewayConfig) -> None:
    """Serve requests and run the background tasks until the process is stopped."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(job()) for job in gateway.jobs]
        async with _serving_http(gateway, config):
            await serve_until_stopped(gateway.server, config)
        for task in running:
            task.cancel()


def main() -> None:
    """Run a gateway with the configuration from the command line."""
    keep_files_private()
    config = load_config(GatewayConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        with serving_admin(config.admin_address(), service=config.service) as readiness:
            run_service(run(config, readiness))
    except (SchemaNotSupported, DatabaseDamaged, StoredRowDamaged, PepperUnusable) as error:
        raise SystemExit(f'{config.service}: {error}') from error
    finally:
        stop_telemetry()


if __name__ == '__main__':
    main()
