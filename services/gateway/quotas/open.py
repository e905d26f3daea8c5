"""Wires quotas and usage, and creates their background jobs."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields

import grpc

from twinkle_services.gateway.catalogue.follow import FeedFollower, Job
from twinkle_services.gateway.catalogue.grpc import GrpcAdapterFeed
from twinkle_services.gateway.config import GatewayConfig, QuotasConfig
from twinkle_services.gateway.keys.sql import SqlTenantStore
from twinkle_services.gateway.quotas.enforcement import QuotaTable, TokenRates, TrainingLimits
from twinkle_services.gateway.quotas.grpc import GrpcDatasetSizes, reading_of
from twinkle_services.gateway.quotas.quotas import Quotas
from twinkle_services.gateway.quotas.rules import Quota
from twinkle_services.gateway.quotas.sql import SqlQuotaStore, SqlUsageStore
from twinkle_services.gateway.quotas.usage_meter import UsageMeter
from twinkle_services.gateway.sessions.grpc import GrpcAdapters
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import Clock


@asynccontextmanager
async def open_quotas(
    config: GatewayConfig,
    database: Database,
    models: Mapping[str, grpc.aio.Channel],
    *,
    data: grpc.aio.Channel | None,
    clock: Clock,
) -> AsyncIterator[Quotas]:
    """Load all quotas, and yield the operations on quotas and usage. Record the remaining usage after the block.

    `models` contains a channel to each model service by name. These channels and `data` have no interceptors.
    """
    table, usage = QuotaTable(SqlQuotaStore(database), default=default_quota(config.quotas)), SqlUsageStore(database)
    await table.read()
    rates = TokenRates(table, clock=clock)
    meter = UsageMeter(usage, rates, clock=clock)
    adapters = GrpcAdapters(tuple(models.values()), internal_token=config.internal_token)
    datasets = GrpcDatasetSizes(data, internal_token=config.internal_token)
    training = TrainingLimits(table, rates, usage, adapters, datasets)
    try:
        yield Quotas(SqlTenantStore(database), usage, table=table, rates=rates, meter=meter, training=training)
    finally:
        await meter.close()


def default_quota(options: QuotasConfig) -> Quota:
    return Quota(**{field.name: getattr(options, field.name) for field in fields(Quota)})


def quota_jobs(
    options: QuotasConfig, quotas: Quotas, models: Mapping[str, grpc.aio.Channel], *, clock: Clock
) -> list[Job]:
    """Return the background jobs of quotas; `models` are internal channels to the model services by name."""
    return [
        lambda: quotas.table.run_forever(interval=options.refresh),
        lambda: quotas.meter.run_forever(interval=options.usage_interval),
        *(
            FeedFollower(
                f'meters of {name}', feed=GrpcAdapterFeed(channel, reading_of), store=quotas.meter, clock=clock
            ).run
            for name, channel in models.items()
        ),
    ]
