"""Opens the fleet of a gateway."""

from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import grpc

from services.gateway.config import GatewayConfig
from services.gateway.fleet.grpc import ReplicaChannels, StaticSampler, is_this_host
from services.gateway.fleet.jobs import ExpireLeases, FollowStatic
from services.gateway.fleet.members import Membership
from services.gateway.fleet.replicas import Replicas
from services.gateway.fleet.rules import Fleet, ReplicaReport
from services.kit.clock import Clock

Job = Callable[[], Coroutine[Any, Any, Any]]
"""Starts a background task that runs until it is cancelled."""


def open_fleet(config: GatewayConfig, stack: AsyncExitStack, *, clock: Clock) -> tuple[Membership, ReplicaChannels]:
    """Return an empty fleet and the channels to its replicas; `stack` closes the channels."""
    options = config.fleet
    channels = ReplicaChannels(config.tls)
    stack.push_async_callback(channels.close)
    return Membership(Fleet(clock=clock, lease=options.lease, forget_after=options.forget_after)), channels


def open_replicas(config: GatewayConfig, membership: Membership) -> Replicas:
    """Return the verbs on replicas."""
    return Replicas(
        membership,
        lease=config.fleet.lease,
        relay_fan_out=config.fleet.relay_fan_out,
        checkpoint_address=config.fleet.checkpoint_address or config.upstreams.checkpoint,
        is_this_host=is_this_host,
    )


def fleet_jobs(
    config: GatewayConfig, membership: Membership, channels: ReplicaChannels, *, sampler: grpc.aio.Channel | None
) -> list[Job]:
    """Return the fleet's background jobs; `sampler` is a channel to the configured static sampler, if any."""
    expire = ExpireLeases(membership, channels=channels)
    jobs: list[Job] = [lambda: expire.keep_on(interval=config.fleet.lease / 10)]
    if sampler is not None:
        address = config.upstreams.sampler
        report = ReplicaReport(replica_id=f'static-{address}', service='sampler', address=address)
        jobs.append(FollowStatic(membership, StaticSampler(report, channel=sampler)).keep_on)
    return jobs
