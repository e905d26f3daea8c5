"""Puts a gateway together and runs it: `python -m services.gateway --config FILE`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway.catalogue.follow_catalogue import FollowCatalogue
from services.gateway.catalogue.get_run import GetRun
from services.gateway.catalogue.grpc_feeds import GrpcCheckpointFeed
from services.gateway.catalogue.list_run_checkpoints import ListRunCheckpoints
from services.gateway.catalogue.list_runs import ListRuns
from services.gateway.catalogue.servicer import CatalogueServicer
from services.gateway.catalogue.sql import SqlCheckpointStore, SqlRunStore
from services.gateway.catalogue.weight_facts import GrpcWeightFacts
from services.gateway.catalogue.wiring import change_checkpoints
from services.gateway.config import GatewayConfig
from services.gateway.exports.wiring import OpenExports, make_exports
from services.gateway.fleet.grpc import ReplicaChannels
from services.gateway.fleet.members import Membership
from services.gateway.fleet.open import fleet_jobs, open_fleet, open_replicas
from services.gateway.fleet.servicer import FleetServicer
from services.gateway.forwarding.endpoints import make_endpoints
from services.gateway.forwarding.fleet_facts import GrpcFleetFacts
from services.gateway.forwarding.server_info import MergedServerInfoServicer, UpstreamFacts
from services.gateway.forwarding.upstream_facts import GrpcUpstreamFacts
from services.gateway.forwarding.wiring import ModelServices, kind_of, model_services
from services.gateway.futures.grpc_trainer import GrpcTrainer
from services.gateway.futures.limits import LimitedTrainer
from services.gateway.futures.verbs import FutureVerbs
from services.gateway.futures.wiring import FutureSampling, OpenFutures, open_futures
from services.gateway.http.open import open_http
from services.gateway.http.server import HttpServer
from services.gateway.keys.authenticator import GatewayAuthenticator, KeyAuthenticator
from services.gateway.keys.open import Accounts, open_keys
from services.gateway.keys.servicer import KeyServicer
from services.gateway.openai.open import open_openai
from services.gateway.openai.samplers import FleetSamplers
from services.gateway.quotas.wiring import (
    ModelQuotas,
    OpenQuotas,
    model_quotas,
    open_quotas,
    quota_jobs,
    quota_servicer,
)
from services.gateway.sampling.limits import SamplingGate
from services.gateway.sampling.open import open_sampling
from services.gateway.sampling.sampling import Sampling
from services.gateway.sampling.servicer import SamplerHandlers, SamplerServicer
from services.gateway.sessions.open import open_sessions, session_job
from services.gateway.sessions.servicer import SessionServicer
from services.gateway.sessions.sessions import Sessions
from services.gateway.store.database import Database
from services.gateway.store.migrations import SchemaNotSupported
from services.gateway.tinker.open import open_tinker, open_tinker_catalogue
from services.kit.clock import Clock, SystemClock
from services.kit.config import load_config
from services.kit.rpc.auth import InternalAuthenticator
from services.kit.rpc.channel import open_channel, open_forwarding_channel
from services.kit.rpc.server import RpcServer, serve_until_stopped, write_address_file
from services.kit.telemetry import start_telemetry, stop_telemetry


@dataclass(frozen=True)
class Gateway:
    """A gateway, put together."""

    server: RpcServer
    """Not started."""
    jobs: tuple[Callable[[], Coroutine[Any, Any, Any]], ...]
    """To be run beside the server, until it stops."""
    futures: FutureVerbs
    """Closed by whoever put it together."""
    http: HttpServer | None = None
    """The HTTP APIs, not started; None where they are not served."""


@asynccontextmanager
async def assembled(config: GatewayConfig, *, clock: Clock) -> AsyncIterator[Gateway]:
    """Open what a gateway needs, put it together, and close everything at the end."""
    async with AsyncExitStack() as stack:
        database = await Database.open(config.database_address())
        stack.push_async_callback(database.close)
        accounts = await open_keys(config, database, clock=clock)
        sessions = open_sessions(config, database, accounts.projects, clock=clock)
        quotas = await stack.enter_async_context(open_quotas(config, database, clock=clock))
        upstreams = await _open_upstreams(config, database, stack, quotas=quotas, clock=clock)
        server = _server(config, database, accounts=accounts, sessions=sessions, upstreams=upstreams, clock=clock)
        futures = await stack.enter_async_context(
            open_futures(
                config,
                database,
                trainer=_trainer(config, upstreams),
                sampling=_sampling(upstreams),
                quotas=quotas,
                clock=clock,
            )
        )
        server.on_drain(futures.verbs.begin_stop)
        yield Gateway(
            server,
            (
                session_job(config, database, models=upstreams.models.channels, versions=futures.handles, clock=clock),
                *upstreams.models.jobs,
                *_catalogue_jobs(database, upstreams, clock=clock),
                *fleet_jobs(config, upstreams.membership, upstreams.channels, sampler=upstreams.own.get('sampler')),
                *quota_jobs(quotas, upstreams.own_models, clock=clock),
                *upstreams.exports.jobs,
                *futures.jobs,
            ),
            futures.verbs,
            _http_server(config, database, accounts=accounts, upstreams=upstreams, futures=futures, clock=clock),
        )


@dataclass(frozen=True)
class _Upstreams:
    """Channels to the services behind the gateway, by service."""

    forwarding: dict[str, grpc.aio.Channel]
    """For clients' calls."""
    own: dict[str, grpc.aio.Channel]
    """For the gateway's own calls."""
    membership: Membership
    """The fleet of samplers."""
    channels: ReplicaChannels
    sampler_facts: GrpcFleetFacts
    sampling: Sampling
    sampling_gate: SamplingGate
    models: ModelServices
    quotas: OpenQuotas
    model_quotas: ModelQuotas
    exports: OpenExports

    @property
    def own_models(self) -> dict[str, grpc.aio.Channel]:
        """For the gateway's own calls to the model services."""
        return {name: channel for name, channel in self.own.items() if kind_of(name) == 'model'}


async def _open_upstreams(
    config: GatewayConfig, database: Database, stack: AsyncExitStack, *, quotas: OpenQuotas, clock: Clock
) -> _Upstreams:
    forwarding, own = dict[str, grpc.aio.Channel](), dict[str, grpc.aio.Channel]()
    for name, address in config.upstreams.addresses().items():
        service = kind_of(name)
        forwarding[name] = await stack.enter_async_context(
            open_forwarding_channel(address, tls=config.tls, service=service)
        )
        own[name] = await stack.enter_async_context(
            open_channel(address, internal_token=config.internal_token, tls=config.tls, service=service)
        )
    models = model_services(config, database, forwarding=forwarding, own=own, clock=clock)
    membership, channels = open_fleet(config, stack, clock=clock)
    sampler_facts = GrpcFleetFacts(
        lambda: [replica.address for replica in membership.fleet.serving('sampler')],
        internal_token=config.internal_token,
        clock=clock,
        freshness=config.server_info_freshness,
        tls=config.tls,
    )
    stack.push_async_callback(sampler_facts.close)
    sampling = open_sampling(config, membership, channels, quotas=quotas)
    exports = make_exports(config, database, forwarding, clock=clock)
    limits = model_quotas(config, quotas, models.channels)
    return _Upstreams(forwarding, own, membership, channels, sampler_facts, *sampling, models, quotas, limits, exports)


def _server(
    config: GatewayConfig,
    database: Database,
    *,
    accounts: Accounts,
    sessions: Sessions,
    upstreams: _Upstreams,
    clock: Clock,
) -> RpcServer:
    runs = SqlRunStore(database)
    catalogue_servicer = CatalogueServicer(
        get_run=GetRun(runs),
        list_runs=ListRuns(runs),
        list_run_checkpoints=ListRunCheckpoints(SqlCheckpointStore(database)),
        change_checkpoints=change_checkpoints(config, database, upstreams.forwarding, clock=clock),
        get_usage=upstreams.quotas.get_usage,
    )
    fleet_servicer = FleetServicer(open_replicas(config, upstreams.membership))
    samplers = SamplerHandlers(SamplerServicer(upstreams.sampling))
    facts = _facts(config, upstreams, clock=clock)
    server = RpcServer(
        config,
        authenticator=_authenticator(config, accounts),
        endpoints=make_endpoints(
            keys=KeyServicer(accounts.tenants, accounts.projects, accounts.keys),
            quotas=quota_servicer(database, upstreams.quotas),
            sessions=SessionServicer(sessions, heartbeat_interval=config.heartbeat_interval),
            catalogue=catalogue_servicer,
            exports=upstreams.exports.servicer,
            fleet=fleet_servicer,
        ),
        generic_handlers={
            samplers: samplers.methods,
            **upstreams.model_quotas.admitted(upstreams.models.forwarders),
        },
        server_info=MergedServerInfoServicer(own=lambda: server.describe(), upstreams=facts),  # noqa: PLW0108 (made after it)
    )
    server.on_drain(upstreams.membership.close)
    return server


def _facts(config: GatewayConfig, upstreams: _Upstreams, *, clock: Clock) -> list[UpstreamFacts]:
    others = [
        GrpcUpstreamFacts(
            service, channel=upstreams.own.get(service), clock=clock, freshness=config.server_info_freshness
        )
        for service in ('data', 'checkpoint')
    ]
    return [*upstreams.models.facts, upstreams.sampler_facts, *others]


def _http_server(
    config: GatewayConfig,
    database: Database,
    *,
    accounts: Accounts,
    upstreams: _Upstreams,
    futures: OpenFutures,
    clock: Clock,
) -> HttpServer | None:
    if not config.http_listen:
        return None
    samplers = FleetSamplers(upstreams.sampling, upstreams.membership, describe=upstreams.sampler_facts.describe)
    sessions = open_sessions(config, database, accounts.projects, clock=clock)
    return open_http(
        config,
        authenticator=KeyAuthenticator(accounts.verifier),
        routes=[
            *open_openai(config, samplers, SqlRunStore(database), clock=clock),
            *open_tinker(
                config,
                database,
                sessions=sessions,
                futures=futures,
                models=upstreams.models,
                samplers=upstreams.sampler_facts,
            ),
            *open_tinker_catalogue(
                database,
                upstreams.quotas.checkpoints(config, upstreams.forwarding.get('checkpoint')),
                accounts=accounts,
                sessions=sessions,
                lookups=upstreams.models.lookups,
                clock=clock,
            ),
        ],
    )


def _trainer(config: GatewayConfig, upstreams: _Upstreams) -> LimitedTrainer | None:
    if upstreams.models.calls is None:
        return None
    limits = upstreams.model_quotas.quotas
    trainer = GrpcTrainer(upstreams.models.calls, internal_token=config.internal_token)
    return LimitedTrainer(trainer, limits.gate, limits.new_adapters, requests=limits.requests)


def _sampling(upstreams: _Upstreams) -> FutureSampling:
    weights = GrpcWeightFacts(upstreams.models.lookups)
    return FutureSampling(verbs=upstreams.sampling, gate=upstreams.sampling_gate, weights=weights)


def _authenticator(config: GatewayConfig, accounts: Accounts) -> GatewayAuthenticator:
    return GatewayAuthenticator(
        KeyAuthenticator(accounts.verifier),
        InternalAuthenticator(config.internal_token),
        internal_token=config.internal_token,
        is_open=config.is_on_loopback(),
    )


def _catalogue_jobs(
    database: Database, upstreams: _Upstreams, *, clock: Clock
) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
    jobs: list[Callable[[], Coroutine[Any, Any, Any]]] = []
    if channel := upstreams.own.get('checkpoint'):
        checkpoints = FollowCatalogue(
            'checkpoints',
            feed=GrpcCheckpointFeed(channel),
            shelf=SqlCheckpointStore(database),
            clock=clock,
        )
        jobs.append(checkpoints.__call__)
    return jobs


@asynccontextmanager
async def _serving_http(gateway: Gateway, config: GatewayConfig) -> AsyncIterator[None]:
    """Serve the HTTP APIs during the block; they drain together with the server.

    Raises:
        SystemExit: their address cannot be listened on; the message names the setting.
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


async def run(config: GatewayConfig) -> None:
    """Serve until asked to stop."""
    async with assembled(config, clock=SystemClock()) as gateway, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(job()) for job in gateway.jobs]
        async with _serving_http(gateway, config):
            await serve_until_stopped(gateway.server, config)
        for task in running:
            task.cancel()


def main() -> None:
    """Run a gateway as the command line says."""
    config = load_config(GatewayConfig)
    start_telemetry(config.telemetry, service=config.service)
    try:
        asyncio.run(run(config))
    except SchemaNotSupported as error:
        raise SystemExit(f'{config.service}: {error}') from error
    finally:
        stop_telemetry()


if __name__ == '__main__':
    main()
