"""Serves the contract for quotas, which is for administrators only, and `GetUsage` of the `CatalogueService`."""

# ruff: noqa: N802 (the methods have the contract's names)

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from twinkle.api.gateway.v1 import catalogue_service_pb2, quota_service_pb2_grpc
from twinkle.api.gateway.v1 import quota_service_pb2 as messages
from twinkle_services.gateway.catalogue.checkpoints import Checkpoints
from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.catalogue.servicer import CatalogueServicer
from twinkle_services.gateway.keys.servicer import tenant_id_from_proto
from twinkle_services.gateway.quotas.quotas import Quotas
from twinkle_services.gateway.quotas.rules import MAX_WEIGHT, MIN_WEIGHT, Quota, TimeRange, Usage
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import time_from_proto

_MINIMUMS = {
    'max_adapters': 0,
    'tokens_per_second': 1,
    'burst_tokens': 1,
    'concurrent_samples': 0,
    'stored_bytes': 0,
    'metric_points': 0,
}


class QuotaServicer(quota_service_pb2_grpc.QuotaServiceServicer):
    """Implements `QuotaService`."""

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
    """Implements `CatalogueService`, including `GetUsage`."""

    def __init__(self, quotas: Quotas, runs: Runs, checkpoints: Checkpoints) -> None:
        super().__init__(runs, checkpoints)
        self._quotas = quotas

    async def GetUsage(
        self, request: catalogue_service_pb2.GetUsageRequest, context: Context
    ) -> catalogue_service_pb2.GetUsageResponse:
        usages = await self._quotas.usage_of_caller(current_caller(), period_from_proto(request))
        return catalogue_service_pb2.GetUsageResponse(usages=usages_to_proto(usages))


def quota_from_proto(message: Any, field: str) -> Quota:
    """Convert a `Quota` message.

    Raises:
        InvalidField: a limit is out of range.
    """
    names = [item.name for item in fields(Quota)]
    values: dict[str, Any] = {name: getattr(message, name) for name in names if message.HasField(name)}
    for name, minimum in _MINIMUMS.items():
        if values.get(name, minimum) < minimum:
            raise InvalidField(f'{field}.{name}', f'must be at least {minimum}, got {values[name]}')
    weight = values.get('weight', MIN_WEIGHT)
    if not math.isfinite(weight) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise InvalidField(f'{field}.weight', f'must be from {MIN_WEIGHT} to {MAX_WEIGHT}, got {weight}')
    return Quota(**values)


def quota_to_proto(quota: Quota) -> messages.Quota:
    """Convert a quota; limits without a value stay unset."""
    return messages.Quota(**vars(quota))


def period_from_proto(request: Any) -> TimeRange:
    """Return the period between a request's `begin_time` and `end_time`.

    Raises:
        InvalidField: a time is out of range, or `end_time` is before `begin_time`.
    """
    begin, end = time_from_proto(request, 'begin_time'), time_from_proto(request, 'end_time')
    if begin is not None and end is not None and end < begin:
        raise InvalidField('end_time', 'must not be before begin_time')
    return TimeRange(begin=begin, end=end)


def usages_to_proto(usages: Iterable[Usage]) -> list[catalogue_service_pb2.Usage]:
    return [
        catalogue_service_pb2.Usage(
            run_id=item.run_id,
            stored_bytes=item.stored_bytes,
            metric_point_count=item.metric_point_count,
            **vars(item.work),
        )
        for item in usages
    ]
