"""What tenants may use and what they used: their own for everybody, anybody's for administrators."""

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
    """Shows and sets quotas, and shows usage; all but the usage of one's own tenant needs the scope 'admin'."""

    def __init__(self, *, client: TwinkleClient | None = None) -> None:
        """Use `client`, or the one that was initialised last."""
        self._connection = current_client(client).connection
        self._stub = QuotaServiceStub(self._connection.channel)
        self._catalogue = CatalogueServiceStub(self._connection.channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Where its coroutines run."""
        return self._connection.loop_thread

    @remote_method
    async def get(self, tenant_id: str) -> pb.GetQuotaResponse:
        """Return a tenant's quota, as it was set and as it counts.

        Raises:
            NotFoundError: there is no such tenant.
        """
        return await self._connection.unary(self._stub.GetQuota, pb.GetQuotaRequest(tenant_id=tenant_id))

    @remote_method
    async def set(self, tenant_id: str, quota: pb.Quota) -> pb.SetQuotaResponse:
        """Set all of a tenant's quota: what is unset in it is as the server is configured.

        Raises:
            NotFoundError: there is no such tenant.
            UsageError: a limit is out of range.
        """
        request = pb.SetQuotaRequest(tenant_id=tenant_id, quota=quota)
        return await self._connection.unary(self._stub.SetQuota, request)

    @remote_method
    async def usage(
        self, tenant_id: str = '', *, begin: datetime | None = None, end: datetime | None = None
    ) -> Sequence[catalogue.Usage]:
        """Return what was used in the hours that begin at `begin` or later and before `end`, a run a line.

        Args:
            tenant_id: whose; empty: of the client's own tenant.
            begin: with its time zone. Unset: from the first.
            end: the same. Unset: until now.

        Raises:
            NotFoundError: there is no such tenant.
        """
        times = {'begin_time': _stamp(begin), 'end_time': _stamp(end)}
        if tenant_id:
            asked = pb.GetTenantUsageRequest(tenant_id=tenant_id, **times)
            return (await self._connection.unary(self._stub.GetTenantUsage, asked)).usages
        request = catalogue.GetUsageRequest(**times)
        return (await self._connection.unary(self._catalogue.GetUsage, request)).usages


def _stamp(moment: datetime | None) -> timestamp_pb2.Timestamp | None:
    if moment is None:
        return None
    stamp = timestamp_pb2.Timestamp()
    stamp.FromDatetime(moment)
    return stamp
