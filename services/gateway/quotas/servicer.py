"""Serves the contract for quotas and usage. The authenticator lets administrators alone come here."""

# ruff: noqa: N802 (the methods have the contract's names)

from typing import Any

import grpc

from services.gateway.keys.convert import tenant_id_from_proto
from services.gateway.quotas.convert import quota_from_proto, quota_to_proto, span_from_proto, usages_to_proto
from services.gateway.quotas.get_quota import GetQuota
from services.gateway.quotas.get_usage import GetTenantUsage
from services.gateway.quotas.set_quota import SetQuota
from twinkle.api.gateway.v1 import quota_service_pb2 as messages
from twinkle.api.gateway.v1 import quota_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class QuotaServicer(quota_service_pb2_grpc.QuotaServiceServicer):
    """Converts, calls the verb, converts."""

    def __init__(self, *, get_quota: GetQuota, set_quota: SetQuota, get_usage: GetTenantUsage) -> None:
        """Serve these verbs."""
        self._get_quota = get_quota
        self._set_quota = set_quota
        self._get_usage = get_usage

    async def GetQuota(self, request: messages.GetQuotaRequest, context: Context) -> messages.GetQuotaResponse:
        """Show a quota."""
        own, effective = await self._get_quota(tenant_id_from_proto(request.tenant_id))
        return messages.GetQuotaResponse(quota=quota_to_proto(own), effective_quota=quota_to_proto(effective))

    async def SetQuota(self, request: messages.SetQuotaRequest, context: Context) -> messages.SetQuotaResponse:
        """Change a quota."""
        tenant_id = tenant_id_from_proto(request.tenant_id)
        own, effective = await self._set_quota(tenant_id, quota_from_proto(request.quota, 'quota'))
        return messages.SetQuotaResponse(quota=quota_to_proto(own), effective_quota=quota_to_proto(effective))

    async def GetTenantUsage(
        self, request: messages.GetTenantUsageRequest, context: Context
    ) -> messages.GetTenantUsageResponse:
        """Say what a tenant used."""
        tenant_id = tenant_id_from_proto(request.tenant_id)
        usages = await self._get_usage(tenant_id, span_from_proto(request))
        return messages.GetTenantUsageResponse(usages=usages_to_proto(usages))
