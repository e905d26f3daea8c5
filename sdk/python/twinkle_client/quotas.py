"""Quotas and usage of tenants."""

from collections.abc import Sequence
from datetime import datetime

from google.protobuf import timestamp_pb2

from twinkle.api.gateway.v1 import catalogue_service_pb2 as catalogue
from twinkle.api.gateway.v1 import quota_service_pb2 as pb
from twinkle.api.gateway.v1.catalogue_service_pb2_grpc import CatalogueServiceStub
from twinkle.api.gateway.v1.quota_service_pb2_grpc import QuotaServiceStub
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.rpc import LoopThread, remote_method


class Quotas:
    """Reads and sets quotas, and reads usage.

    The API key needs the scope 'admin', except to read the usage of the key's tenant. `client` defaults to the client
    initialized last.
    """

    def __init__(self, *, client: TwinkleClient | None = None) -> None:
        self._connection = current_client(client).connection
        self._stub = QuotaServiceStub(self._connection.channel)
        self._catalogue = CatalogueServiceStub(self._connection.channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    @remote_method
    async def get(self, tenant_id: str) -> pb.GetQuotaResponse:
        """Return a tenant's quota: the configured values and the values in effect.

        Raises:
            NotFoundError: The tenant does not exist.
        """
        return await self._connection.unary(self._stub.GetQuota, pb.GetQuotaRequest(tenant_id=tenant_id))

    @remote_method
    async def set(self, tenant_id: str, quota: pb.Quota) -> pb.SetQuotaResponse:
        """Replace a tenant's quota. An unset limit takes its value from the server's configuration, or has no limit.

        Raises:
            NotFoundError: The tenant does not exist.
            UsageError: A limit is out of range.
        """
        request = pb.SetQuotaRequest(tenant_id=tenant_id, quota=quota)
        return await self._connection.unary(self._stub.SetQuota, request)

    @remote_method
    async def usage(
        self, tenant_id: str = '', *, begin: datetime | None = None, end: datetime | None = None
    ) -> Sequence[catalogue.Usage]:
        """Return the usage of each run in the hours that start in [`begin`, `end`).

        The fields `stored_bytes`, the size of the run's checkpoints, and `metric_point_count` are current values.

        Args:
            tenant_id: Tenant. Empty: the tenant of the API key.
            begin: Time with a time zone. Unset: the first hour on record.
            end: Time with a time zone. Unset: now.

        Raises:
            NotFoundError: The tenant does not exist.
            UsageError: `end` is before `begin`.
        """
        times = {'begin_time': _timestamp(begin), 'end_time': _timestamp(end)}
        if tenant_id:
            request = pb.GetTenantUsageRequest(tenant_id=tenant_id, **times)
            return (await self._connection.unary(self._stub.GetTenantUsage, request)).usages
        own_request = catalogue.GetUsageRequest(**times)
        return (await self._connection.unary(self._catalogue.GetUsage, own_request)).usages


def _timestamp(time: datetime | None) -> timestamp_pb2.Timestamp | None:
    if time is None:
        return None
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromDatetime(time)
    return timestamp
