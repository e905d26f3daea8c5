"""Puts quotas and usage together: who may do what, what was done, and who is told."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway.catalogue.follow_catalogue import FollowCatalogue
from services.gateway.catalogue.limited_checkpoints import LimitedCheckpoints
from services.gateway.config import GatewayConfig, QuotasConfig
from services.gateway.forwarding.admission import AdmittedCalls, Quotas
from services.gateway.keys.sql import SqlTenantStore
from services.gateway.quotas.book import QuotaBook
from services.gateway.quotas.get_quota import GetQuota
from services.gateway.quotas.get_usage import GetTenantUsage, GetUsage
from services.gateway.quotas.meter import UsageMeter
from services.gateway.quotas.new_adapters import NewAdapters
from services.gateway.quotas.rates import TokenRates
from services.gateway.quotas.requests import QuotaRequests
from services.gateway.quotas.servicer import QuotaServicer
from services.gateway.quotas.set_quota import SetQuota
from services.gateway.quotas.sql import SqlQuotaStore
from services.gateway.quotas.sql_usage import SqlUsageStore
from services.gateway.quotas.training import TrainingGate
from services.gateway.quotas.upstream_requests import is_save, refused_creation, refused_save
from services.gateway.quotas.usage_feed import GrpcMeterFeed
from services.gateway.sessions.grpc import GrpcAdapters
from services.gateway.store.database import Database
from services.kit.clock import Clock

Job = Callable[[], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, kw_only=True)
class OpenQuotas:
    """What everything is held to and counted by."""

    options: QuotasConfig
    book: QuotaBook
    rates: TokenRates
    meter: UsageMeter
    training_gate: TrainingGate
    get_usage: GetUsage

    def checkpoints(self, config: GatewayConfig, channel: grpc.aio.Channel | None) -> LimitedCheckpoints:
        """Return calls over a bare channel to the checkpoint service, held to storage quotas."""
        return LimitedCheckpoints(channel, internal_token=config.internal_token, check=self.training_gate.check_storage)


@dataclass(frozen=True, kw_only=True)
class ModelQuotas:
    """What calls of the model services are held to."""

    quotas: Quotas

    def admitted(self, handlers: Sequence[Any]) -> dict[grpc.GenericRpcHandler, Mapping[str, bool]]:
        """Return handlers of forwarded calls that are held to it, with the methods that each serves."""
        return {AdmittedCalls(handler, self.quotas): handler.methods for handler in handlers}


@asynccontextmanager
async def open_quotas(config: GatewayConfig, database: Database, *, clock: Clock) -> AsyncIterator[OpenQuotas]:
    """Hold tenants to quotas, and count, during the block; at its end, what was counted is written down."""
    options, usage = config.quotas, SqlUsageStore(database)
    book = QuotaBook(SqlQuotaStore(database), default=options.default())
    await book.read()
    rates = TokenRates(book, clock=clock)
    meter = UsageMeter(usage, rates, clock=clock)
    try:
        yield OpenQuotas(
            options=options,
            book=book,
            rates=rates,
            meter=meter,
            training_gate=TrainingGate(book, rates, usage),
            get_usage=GetUsage(usage, meter),
        )
    finally:
        await meter.close()


def model_quotas(config: GatewayConfig, quotas: OpenQuotas, channels: Sequence[grpc.aio.Channel]) -> ModelQuotas:
    """Return what calls of the model services are held to, given bare channels to all of them."""
    census = GrpcAdapters(channels, internal_token=config.internal_token)
    return ModelQuotas(
        quotas=Quotas(
            new_adapters=NewAdapters(quotas.book, census),
            gate=quotas.training_gate,
            requests=QuotaRequests(is_save=is_save, refused_save=refused_save, refused_creation=refused_creation),
            patience_seconds=config.quotas.patience.total_seconds(),
        )
    )


def quota_servicer(database: Database, quotas: OpenQuotas) -> QuotaServicer:
    """Return what serves administrators."""
    tenants = SqlTenantStore(database)
    return QuotaServicer(
        get_quota=GetQuota(tenants, quotas.book),
        set_quota=SetQuota(tenants, quotas.book),
        get_usage=GetTenantUsage(tenants, quotas.get_usage),
    )


def quota_jobs(quotas: OpenQuotas, own: Mapping[str, grpc.aio.Channel], *, clock: Clock) -> list[Job]:
    """Return what is to be run until the gateway stops.

    Args:
        quotas: to be kept up to date.
        own: channels to the model services for the gateway's own calls, by name.
        clock: tells the time.
    """
    options = quotas.options
    return [
        lambda: quotas.book.keep_on(interval=options.refresh),
        lambda: quotas.meter.keep_on(interval=options.usage_interval),
        *(
            FollowCatalogue(f'meters of {name}', feed=GrpcMeterFeed(channel), shelf=quotas.meter, clock=clock).__call__
            for name, channel in own.items()
        ),
    ]
