"""Operations on quotas and usage."""

from collections.abc import Sequence

from twinkle_services.gateway.errors import TenantNotFound
from twinkle_services.gateway.keys.ports import TenantStore
from twinkle_services.gateway.quotas.enforcement import QuotaTable, TokenRates, TrainingLimits
from twinkle_services.gateway.quotas.ports import UsageStore
from twinkle_services.gateway.quotas.rules import Quota, TimeRange, Usage, Work
from twinkle_services.gateway.quotas.usage_meter import UsageMeter
from twinkle_services.kit.caller import Caller


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
        tenants: TenantStore,
        usage: UsageStore,
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
        await self._require_tenant(tenant_id)
        await self.table.read()
        return self.table.set_for(tenant_id), self.table.of(tenant_id)

    async def set(self, tenant_id: str, quota: Quota) -> tuple[Quota, Quota]:
        """Replace a tenant's quota; return it and the limits in effect. Running work is not interrupted.

        Raises:
            TenantNotFound: no tenant has this id.
        """
        await self._require_tenant(tenant_id)
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
        await self._require_tenant(tenant_id)
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

    async def _require_tenant(self, tenant_id: str) -> None:
        if await self._tenants.get(tenant_id) is None:
            raise TenantNotFound(tenant_id)
