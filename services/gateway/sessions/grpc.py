"""Client of the model services that lists and parks the adapters of a tenant."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import grpc

from twinkle.api.model.v1 import adapter_pb2, adapter_service_pb2, adapter_service_pb2_grpc
from twinkle_services.gateway.sessions.rules import ParkedAdapter
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import AdapterNotFound, Code, DomainError
from twinkle_services.kit.paging import MAX_PAGE_SIZE
from twinkle_services.kit.rpc.channel import call_errors, forwarded_metadata
from twinkle_services.kit.rpc.context import acting_for

_TIMEOUT_SECONDS = 30.0
_PARKING_SECONDS = 600.0
"""Timeout of parking, which may load the adapter and write a checkpoint to disk."""


class GrpcAdapters:
    """Lists and parks the adapters of a tenant. Every method may raise a DomainError of a model service.

    Implements `AdapterLister` of the quotas.
    """

    def __init__(self, channels: Sequence[grpc.aio.Channel], *, internal_token: str) -> None:
        """Use one channel without credentials to each model service; the caller closes the channels."""
        self._stubs = [adapter_service_pb2_grpc.AdapterServiceStub(channel) for channel in channels]
        self._internal_token = internal_token

    async def adapter_ids(self, tenant_id: str) -> Collection[str]:
        return await self._list(tenant_id, session_id='')

    async def of_session(self, tenant_id: str, session_id: str) -> Sequence[str]:
        """Return the ids of the session's adapters at all model services."""
        return await self._list(tenant_id, session_id=session_id)

    async def park(self, tenant_id: str, adapter_id: str, *, save_prefix: str) -> ParkedAdapter | None:
        """Park an adapter. If `save_prefix` is not empty, first save unsaved steps under a name that begins with it.

        Idempotency: parking an adapter again has no effect.

        Returns:
            The result; None if the adapter no longer exists.
        """
        request = adapter_service_pb2.ParkAdapterRequest(adapter_id=adapter_id, save_prefix=save_prefix)
        failure: DomainError | None = None
        for stub in self._stubs:
            try:
                response = await self._call(stub.ParkAdapter, request, tenant_id=tenant_id, seconds=_PARKING_SECONDS)
            except AdapterNotFound:
                continue
            except DomainError as error:
                # Another service may have the adapter.
                failure = failure or error
                continue
            return _parked(response.adapter)
        if failure is not None:
            raise failure
        return None

    async def _list(self, tenant_id: str, *, session_id: str) -> list[str]:
        """Return the ids of the session's adapters, or of all adapters if `session_id` is empty."""
        found: list[str] = []
        for stub in self._stubs:
            request = adapter_service_pb2.ListAdaptersRequest(session_id=session_id, page_size=MAX_PAGE_SIZE)
            while True:
                page = await self._call(stub.ListAdapters, request, tenant_id=tenant_id)
                found += [adapter.adapter_id for adapter in page.adapters]
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
        return found

    async def _call(self, method: Any, request: Any, *, tenant_id: str, seconds: float = _TIMEOUT_SECONDS) -> Any:
        with acting_for(Caller(tenant_id=tenant_id)):
            metadata = forwarded_metadata(self._internal_token, is_internal=True)
        try:
            with call_errors('model'):
                return await method(request, timeout=seconds, metadata=metadata)
        except DomainError as error:
            if error.code is Code.NOT_FOUND:
                raise AdapterNotFound(getattr(request, 'adapter_id', '')) from error
            raise


def _parked(adapter: adapter_pb2.Adapter) -> ParkedAdapter:
    return ParkedAdapter(is_idle=adapter.is_parked and not adapter.has_lease, checkpoint_path=adapter.checkpoint_path)
