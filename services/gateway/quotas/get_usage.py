"""The verbs that say what was used."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from services.gateway.errors import TenantNotFound
from services.gateway.keys.ports import TenantStore
from services.gateway.quotas.meter import UsageMeter
from services.gateway.quotas.ports import UsageStore
from services.gateway.quotas.usage import Usage
from services.kit.caller import Caller


@dataclass(frozen=True, kw_only=True)
class Span:
    """A time; None: without that end."""

    begin: datetime | None = None
    end: datetime | None = None


class GetUsage:
    """Says it of the caller's own tenant, this gateway's last second included."""

    def __init__(self, usage: UsageStore, meter: UsageMeter) -> None:
        """Ask `usage`, once `meter` has written down what it counted."""
        self._usage = usage
        self._meter = meter

    async def __call__(self, caller: Caller, span: Span) -> Sequence[Usage]:
        """Return what was used, by run."""
        return await self.of(caller.tenant_id, span)

    async def of(self, tenant_id: str, span: Span) -> Sequence[Usage]:
        """Return what a tenant used, by run."""
        await self._meter.flush()
        return await self._usage.list_of(tenant_id, begin=span.begin, end=span.end)


class GetTenantUsage:
    """Says it of any tenant, for administrators."""

    def __init__(self, tenants: TenantStore, get_usage: GetUsage) -> None:
        """Ask `get_usage` about what is in `tenants`."""
        self._tenants = tenants
        self._get_usage = get_usage

    async def __call__(self, tenant_id: str, span: Span) -> Sequence[Usage]:
        """Return what a tenant used, by run.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        if await self._tenants.get(tenant_id) is None:
            raise TenantNotFound(tenant_id)
        return await self._get_usage.of(tenant_id, span)
