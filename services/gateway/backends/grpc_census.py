"""Which adapters a tenant has, asked of every model service."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import grpc

from services.kit.caller import Caller
from services.kit.paging import MAX_PAGE_SIZE
from services.kit.rpc.channel import forwarded_metadata
from services.kit.rpc.context import acting_for
from services.kit.rpc.status import error_from_call
from twinkle.api.model.v1 import adapter_service_pb2

_LIST = f'/{adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name}/ListAdapters'
_PATIENCE_SECONDS = 30.0


class GrpcAdapterCensus:
    """Implements `ports.AdapterCensus`."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], *, internal_token: str) -> None:
        """Ask over `channels`, bare ones, one for each model service."""
        self._channels = channels
        self._internal_token = internal_token

    async def adapter_ids(self, tenant_id: str) -> Collection[str]:
        """Return a tenant's adapters, of all base models, as they are now.

        Raises:
            DomainError: a service's own error, or ServiceUnreachable.
        """
        found: set[str] = set()
        for channel in self._channels:
            token = ''
            while True:
                page = await self._page(channel, tenant_id, token)
                found.update(adapter.adapter_id for adapter in page.adapters)
                token = page.next_page_token
                if not token:
                    break
        return found

    async def _page(
        self, channel: grpc.aio.Channel, tenant_id: str, token: str
    ) -> adapter_service_pb2.ListAdaptersResponse:
        request = adapter_service_pb2.ListAdaptersRequest(page_size=MAX_PAGE_SIZE, page_token=token)
        with acting_for(Caller(tenant_id=tenant_id, scopes=frozenset({'train'}))):
            metadata = forwarded_metadata(self._internal_token)
        call = cast(Any, channel).unary_unary(_LIST)
        try:
            raw = await call(request.SerializeToString(), timeout=_PATIENCE_SECONDS, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='model') from error
        return adapter_service_pb2.ListAdaptersResponse.FromString(raw)
