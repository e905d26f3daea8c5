"""Operations on quotas and usage, and their background jobs."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields

import grpc

from twinkle_services.gateway.config import GatewayConfig, QuotasConfig
from twinkle_services.gateway.keys.tenants import Tenants
from twinkle_services.gateway.quotas.enforcement import QuotaTable, TokenRates, TrainingLimits
from twinkle_services.gateway.quotas.grpc import GrpcDatasetSizes
from twinkle_services.gateway.quotas.rules import Quota, TimeRange, Usage, Work
from twinkle_services.gateway.quotas.sql import SqlQuotaStore, SqlUsageStore
from twinkle_services.gateway.quotas.usage_meter import UsageMeter
from twinkle_services.gateway.sessions.grpc import GrpcAdapters
from twinkle_services.gateway.sessions.sweep import Job
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock


class Quotas:
    """Reads and sets the quotas of tenants, and reports their usage.

    Attributes:
        table: quotas in memory.
        rates: token rates of all tenants.
        meter: counts the usage of all tenants.
        training: limits of training operations.
    """

    def __init__(
        self,
        tenants: Tenants,
        usage: SqlUsageStore,
        *,
        table: QuotaTable,
        rates: TokenRates,
        meter: UsageMeter,
        training: TrainingLimits,
    ) -> None:
        self._tenants = tenants
        self._usage = usage
        self.table = table
        self.rates = rates
        self.meter = meter
        self.training = training

    async def get(self, tenant_id: str) -> tuple[Quota, Quota]:
        """Return the quota that was set for a tenant, and the limits in effect.

        Raises:
            TenantNotFound: no tenant has this id.
        """
        await self._tenants.check(tenant_id)
        await self.table.read()
        return self.table.set_for(tenant_id), self.table.of(tenant_id)

    async def set(self, tenant_id: str, quota: Quota) -> tuple[Quota, Quota]:
        """Replace a tenant's quota; return it and the limits in effect. Running work is not interrupted.

        Raises:
            TenantNotFound: no tenant has this id.
        """
        await self._tenants.check(tenant_id)
        await self.table.put(tenant_id, quota)
        return self.table.set_for(tenant_id), self.table.of(tenant_id)

    async def usage_of_caller(self, caller: Caller, period: TimeRange) -> Sequence[Usage]:
        """Return the usage of the caller's tenant, by run, including all usage that this gateway has counted."""
        return await self._usage_of(caller.tenant_id, period)

    async def usage_of_tenant(self, tenant_id: str, period: TimeRange) -> Sequence[Usage]:
        """Return the usage of any tenant, by run, for administrators.

        Raises:
            TenantNotFound: no tenant has this id.
        """
        await self._tenants.check(tenant_id)
        return await self._usage_of(tenant_id, period)

    async def _usage_of(self, tenant_id: str, period: TimeRange) -> Sequence[Usage]:
        await self.meter.flush()
        usages = await self._usage.list_of(tenant_id, begin=period.begin, end=period.end)
        dataset_bytes = await self.training.dataset_bytes(tenant_id)
        if not dataset_bytes:
            return usages
        work = next((usage.work for usage in usages if not usage.run_id), Work())
        without_run = Usage(run_id='', work=work, stored_bytes=dataset_bytes)
        return [without_run, *(usage for usage in usages if usage.run_id)]


@asynccontextmanager
async def open_quotas(
    config: GatewayConfig,
    database: Database,
    tenants: Tenants,
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
        yield Quotas(tenants, usage, table=table, rates=rates, meter=meter, training=training)
    finally:
        await meter.close()


def default_quota(options: QuotasConfig) -> Quota:
    return Quota(**{field.name: getattr(options, field.name) for field in fields(Quota)})


def quota_jobs(options: QuotasConfig, quotas: Quotas) -> list[Job]:
    return [
        lambda: quotas.table.run_forever(interval=options.refresh),
        lambda: quotas.meter.run_forever(interval=options.usage_interval),
    ]
