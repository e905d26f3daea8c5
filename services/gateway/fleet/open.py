"""Wires the services behind a gateway: the channels to them, the fleet of samplers, and the background jobs."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Never

import grpc

from twinkle_services.gateway.catalogue.follow import Copy, adapter_jobs
from twinkle_services.gateway.catalogue.grpc import run_of
from twinkle_services.gateway.catalogue.sql import SqlAssignmentStore, SqlRunStore
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.fleet.grpc import ReplicaChannels, StaticSampler, is_this_host
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.model_routes import MODEL, ModelRoutes
from twinkle_services.gateway.fleet.replicas import Replicas
from twinkle_services.gateway.fleet.rules import Fleet, ReplicaReport
from twinkle_services.gateway.fleet.upstreams import (
    GrpcFleetFacts,
    GrpcModelFacts,
    GrpcUpstreamFacts,
    ServiceRuns,
    Upstreams,
)
from twinkle_services.gateway.sessions.sweep import Job
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.rpc.channel import open_channel, open_forwarding_channel
from twinkle_services.kit.telemetry import measures

_SHORTEST_REFRESH_SECONDS = 0.1


async def open_upstreams(
    config: GatewayConfig, database: Database, stack: AsyncExitStack, *, clock: Clock
) -> Upstreams:
    """Return the configured services behind the gateway; `stack` closes the channels to them."""
    channels, internal = dict[str, grpc.aio.Channel](), dict[str, grpc.aio.Channel]()
    for name, address in config.upstreams.addresses().items():
        kind = _kind_of(name)
        channel = open_forwarding_channel(address, tls=config.tls, service=kind)
        channels[name] = await stack.enter_async_context(channel)
        channel = open_channel(address, internal_token=config.internal_token, tls=config.tls, service=kind)
        internal[name] = await stack.enter_async_context(channel)
    names = tuple(config.upstreams.model_addresses())
    facts = {
        name: GrpcUpstreamFacts(
            _kind_of(name), channel=internal.get(name), clock=clock, freshness=config.server_info_freshness
        )
        for name in (*(names or (MODEL,)), 'data', 'checkpoint')
    }
    token, routes = config.internal_token, None
    if len(names) > 1:
        queries = GrpcModelFacts(facts, channels, internal_token=token)
        runs, assignments = SqlRunStore(database), SqlAssignmentStore(database)
        routes = ModelRoutes(names, facts=queries, runs=runs, assignments=assignments)
    return Upstreams(channels, internal, names, facts=facts, routes=routes, internal_token=token)


def upstream_jobs(
    config: GatewayConfig, database: Database, upstreams: Upstreams, *, meters: Copy[Any], clock: Clock
) -> list[Job]:
    """Return the background jobs that copy runs to the catalogue and refresh the routes to model services.

    `meters` is another copy of the adapters that is made from the same feeds.
    """
    routes, runs = upstreams.routes, SqlRunStore(database)

    def copies_of(service: str) -> list[Copy[Any]]:
        store = runs if routes is None else ServiceRuns(runs, service, routes)
        # The meters are in memory, so they come first. A database that does not respond delays only later events.
        return [meters, (run_of, store)]

    jobs = adapter_jobs('adapters', upstreams.internal_models, copies_of, clock=clock)
    if routes is not None:
        interval = max(config.server_info_freshness.total_seconds(), _SHORTEST_REFRESH_SECONDS)
        jobs.append(lambda: routes.run_forever(interval_seconds=interval))
    return jobs


async def open_fleet(
    config: GatewayConfig, stack: AsyncExitStack, *, clock: Clock
) -> tuple[Membership, ReplicaChannels, GrpcFleetFacts]:
    """Return an empty fleet, channels to its replicas, and facts about the replicas; `stack` closes the channels."""
    options = config.fleet
    membership = Membership(Fleet(clock=clock, lease=options.lease, forget_after=options.forget_after))
    channels = ReplicaChannels(config.tls)
    stack.push_async_callback(channels.close)
    stack.enter_context(measures.fleet_members.observing(membership.count_by_state))
    facts = GrpcFleetFacts(
        lambda: [replica.address for replica in membership.fleet.serving('sampler')],
        internal_token=config.internal_token,
        clock=clock,
        freshness=config.server_info_freshness,
        tls=config.tls,
    )
    stack.push_async_callback(facts.close)
    return membership, channels, facts


def open_replicas(config: GatewayConfig, membership: Membership) -> Replicas:
    address = config.fleet.checkpoint_address or config.upstreams.checkpoint
    return Replicas(membership, config.fleet, checkpoint_address=address, is_this_host=is_this_host)


def fleet_jobs(
    config: GatewayConfig, membership: Membership, channels: ReplicaChannels, *, sampler: grpc.aio.Channel | None
) -> list[Job]:
    """Return the fleet's background jobs; `sampler` is an internal channel to the configured sampler, or None."""
    jobs: list[Job] = [partial(_expire_leases, membership, channels, interval=config.fleet.lease / 10)]
    if sampler is not None:
        address = config.upstreams.sampler
        report = ReplicaReport(replica_id=f'static-{address}', service='sampler', address=address)
        membership.fleet.register(report, is_static=True)
        jobs.append(partial(StaticSampler(report, channel=sampler).run, membership))
    return jobs


def _kind_of(service: str) -> str:
    """Return the kind of a service behind the gateway: 'model' for 'model-2'."""
    return service.partition('-')[0]


async def _expire_leases(membership: Membership, channels: ReplicaChannels, *, interval: timedelta) -> Never:
    """Mark replicas with an expired lease as lost, and close the channels to removed replicas, until cancelled."""
    while True:
        await asyncio.sleep(interval.total_seconds())
        membership.expire()
        await channels.keep_only(membership.addresses_in_use())
