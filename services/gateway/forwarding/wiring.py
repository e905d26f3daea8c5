"""Puts together what finds the model service of a call, where there are one or several of them."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc

from services.gateway.catalogue.follow_catalogue import FollowCatalogue
from services.gateway.catalogue.grpc_feeds import GrpcRunFeed
from services.gateway.catalogue.service_runs import SqlServiceRuns
from services.gateway.catalogue.sql import SqlRunStore
from services.gateway.config import GatewayConfig
from services.gateway.forwarding.bytes import Forwarder
from services.gateway.forwarding.endpoints import FORWARDED
from services.gateway.forwarding.grpc_lookups import GrpcLookups
from services.gateway.forwarding.model_channels import GrpcModelFacts, ModelChannels
from services.gateway.forwarding.model_forwarding import ModelForwarder
from services.gateway.forwarding.route_models import MODEL, OneModel, RouteModels
from services.gateway.forwarding.upstream_facts import GrpcUpstreamFacts
from services.gateway.store.database import Database
from services.kit.clock import Clock

Channels = Mapping[str, grpc.aio.Channel]
Job = Callable[[], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, kw_only=True)
class ModelServices:
    """The model services of a deployment."""

    calls: ModelChannels | None
    """For the gateway's calls on behalf of tenants; None: there is no model service."""
    channels: tuple[grpc.aio.Channel, ...]
    """To each of them, bare."""
    lookups: GrpcLookups
    """Ask them, and the checkpoint service, for the current caller."""
    facts: tuple[GrpcUpstreamFacts, ...]
    """What each says of itself; of one that is not there, that it cannot be reached."""
    forwarders: tuple[Forwarder | ModelForwarder, ...]
    """For clients' calls to all services behind the gateway."""
    jobs: tuple[Job, ...]
    """To be run until the gateway stops."""


def model_services(
    config: GatewayConfig, database: Database, *, forwarding: Channels, own: Channels, clock: Clock
) -> ModelServices:
    """Return them.

    Args:
        config: names them.
        database: remembers whose base model an adapter has.
        forwarding: bare channels to all services behind the gateway, by name.
        own: channels to them for the gateway's own calls.
        clock: tells the time.
    """
    names = tuple(config.upstreams.model_addresses())
    facts = {
        name: GrpcUpstreamFacts(MODEL, channel=own.get(name), clock=clock, freshness=config.server_info_freshness)
        for name in names or (MODEL,)
    }
    channels = {name: forwarding[name] for name in names}
    if len(names) > 1:
        asked = GrpcModelFacts(facts, channels, internal_token=config.internal_token)
        routes = RouteModels(names, facts=asked, runs=SqlRunStore(database))
        forwarders = _forwarders_to_several(channels, forwarding, routes, internal_token=config.internal_token)
        shelves = {name: SqlServiceRuns(database, name, routes.base_models_of) for name in names}
        jobs = [_keep_learning(routes, config.server_info_freshness)]
    else:
        routes = OneModel()
        forwarders = (Forwarder(FORWARDED, channels=forwarding, internal_token=config.internal_token),)
        shelves, jobs = {name: SqlRunStore(database) for name in names}, list[Job]()
    calls = ModelChannels(routes, channels) if names else None
    return ModelServices(
        calls=calls,
        channels=tuple(channels.values()),
        lookups=GrpcLookups(calls, forwarding.get('checkpoint'), internal_token=config.internal_token),
        facts=tuple(facts.values()),
        forwarders=forwarders,
        jobs=(*jobs, *(_follow(name, own[name], shelves[name], clock=clock) for name in names)),
    )


def _forwarders_to_several(
    channels: Channels, all_channels: Channels, routes: RouteModels, *, internal_token: str
) -> tuple[Forwarder, ModelForwarder]:
    others = {service: contracts for service, contracts in FORWARDED.items() if service != MODEL}
    return (
        Forwarder(others, channels=all_channels, internal_token=internal_token),
        ModelForwarder(FORWARDED[MODEL], channels=channels, routes=routes, internal_token=internal_token),
    )


def _keep_learning(routes: RouteModels, freshness: timedelta) -> Job:
    interval = max(freshness.total_seconds(), _SHORTEST_SECONDS)
    return lambda: routes.keep_learning(interval_seconds=interval)


_SHORTEST_SECONDS = 0.1
"""Between two questions for base models, however fresh they are to be."""


def kind_of(service: str) -> str:
    """Return what a service behind the gateway is: 'model' for 'model-2'."""
    return service.partition('-')[0]


def _follow(name: str, channel: grpc.aio.Channel, shelf: SqlRunStore | SqlServiceRuns, *, clock: Clock) -> Job:
    feed = 'runs' if name == MODEL else f'runs of {name}'
    return FollowCatalogue(feed, feed=GrpcRunFeed(channel), shelf=shelf, clock=clock).__call__
