"""The QuotaService of the contract, for administrators only, and the usage report of the CatalogueService."""

# ruff: noqa: N802 (the methods have the contract's names)

from typing import Any

import grpc

from services.gateway.catalogue.checkpoints import Checkpoints
from services.gateway.catalogue.runs import Runs
from services.gateway.catalogue.servicer import CatalogueServicer
from services.gateway.keys.convert import tenant_id_from_proto
from services.gateway.quotas.convert import period_from_proto, quota_from_proto, quota_to_proto, usages_to_proto
from services.gateway.quotas.quotas import Quotas
from services.kit.rpc.context import current_caller
from twinkle.api.gateway.v1 import catalogue_service_pb2, quota_service_pb2_grpc
from twinkle.api.gateway.v1 import quota_service_pb2 as messages

Context = grpc.aio.ServicerContext[Any, Any]


class QuotaServicer(quota_service_pb2_grpc.QuotaServiceServicer):
    """Shows and sets quotas, and reports usage."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    async def GetQuota(self, request: messages.GetQuotaRequest, context: Context) -> messages.GetQuotaResponse:
        own, effective = await self._quotas.get(tenant_id_from_proto(request.tenant_id))
        return messages.GetQuotaResponse(quota=quota_to_proto(own), effective_quota=quota_to_proto(effective))

    async def SetQuota(self, request: messages.SetQuotaRequest, context: Context) -> messages.SetQuotaResponse:
        tenant_id = tenant_id_from_proto(request.tenant_id)
        own, effective = await self._quotas.set(tenant_id, quota_from_proto(request.quota, 'quota'))
        return messages.SetQuotaResponse(quota=quota_to_proto(own), effective_quota=quota_to_proto(effective))

    async def GetTenantUsage(
        self, request: messages.GetTenantUsageRequest, context: Context
    ) -> messages.GetTenantUsageResponse:
        tenant_id = tenant_id_from_proto(request.tenant_id)
        usages = await self._quotas.usage_of_tenant(tenant_id, period_from_proto(request))
        return messages.GetTenantUsageResponse(usages=usages_to_proto(usages))


class UsageServicer(CatalogueServicer):
    """Implements `CatalogueService` with `GetUsage`, which quotas answer."""

    def __init__(self, quotas: Quotas, runs: Runs, checkpoints: Checkpoints) -> None:
        super().__init__(runs, checkpoints)
        self._quotas = quotas

    async def GetUsage(
        self, request: catalogue_service_pb2.GetUsageRequest, context: Context
    ) -> catalogue_service_pb2.GetUsageResponse:
        usages = await self._quotas.usage_of_caller(current_caller(), period_from_proto(request))
        return catalogue_service_pb2.GetUsageResponse(usages=usages_to_proto(usages))
