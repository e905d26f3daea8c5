"""Puts the fleet together: who is in it, who finds a replica for a request, and what can be asked of it."""

from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway.config import GatewayConfig
from services.gateway.fleet.drain import Drain
from services.gateway.fleet.fleet_facts import GrpcFleetFacts
from services.gateway.fleet.fleet_verbs import FleetVerbs
from services.gateway.fleet.keep_fleet import ExpireLeases, FollowStatic
from services.gateway.fleet.lease import Lease
from services.gateway.fleet.list_replicas import ListReplicas
from services.gateway.fleet.membership import Membership
from services.gateway.fleet.own_addresses import is_this_host
from services.gateway.fleet.register import Register
from services.gateway.fleet.replica_channels import ReplicaChannels
from services.gateway.fleet.rules import Fleet, ReplicaReport
from services.gateway.fleet.static_sampler import GrpcStaticSampler
from services.gateway.fleet.watch_fleet import WatchFleet
from services.kit.clock import Clock


@dataclass(frozen=True)
class OpenFleet:
    """The fleet, and what is done with it."""

    membership: Membership
    channels: ReplicaChannels
    facts: GrpcFleetFacts
    verbs: FleetVerbs


async def open_fleet(config: GatewayConfig, stack: AsyncExitStack, *, clock: Clock) -> OpenFleet:
    """Return the fleet, without anybody in it.

    Args:
        config: of the gateway.
        stack: closes what is opened.
        clock: tells the time.
    """
    options = config.fleet
    membership = Membership(Fleet(clock=clock, lease=options.lease, forget_after=options.forget_after))
    channels = ReplicaChannels(config.tls)
    stack.push_async_callback(channels.close)
    facts = GrpcFleetFacts(
        lambda: [replica.address for replica in membership.fleet.serving('sampler')],
        internal_token=config.internal_token,
        clock=clock,
        freshness=config.server_info_freshness,
        tls=config.tls,
    )
    stack.push_async_callback(facts.close)
    verbs = FleetVerbs(
        register=Register(
            membership,
            checkpoint_address=options.checkpoint_address or config.upstreams.checkpoint,
            is_this_host=is_this_host,
        ),
        lease=Lease(membership, duration=options.lease, relay_fan_out=options.relay_fan_out),
        drain=Drain(membership),
        list_replicas=ListReplicas(membership),
        watch_fleet=WatchFleet(membership),
    )
    return OpenFleet(membership, channels, facts, verbs)


def fleet_jobs(
    config: GatewayConfig, fleet: OpenFleet, sampler: grpc.aio.Channel | None
) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
    """Return what is to be run until the gateway stops; `sampler` is a channel to the one that is configured."""
    expire = ExpireLeases(fleet.membership, channels=fleet.channels)
    jobs: list[Callable[[], Coroutine[Any, Any, Any]]] = [lambda: expire.keep_on(interval=config.fleet.lease / 10)]
    if sampler is not None:
        address = config.upstreams.sampler
        report = ReplicaReport(replica_id=f'static-{address}', service='sampler', address=address)
        static = FollowStatic(fleet.membership, GrpcStaticSampler(report, channel=sampler), report=report)
        jobs.append(static.keep_on)
    return jobs
