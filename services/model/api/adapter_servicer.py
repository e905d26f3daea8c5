"""Making and finding adapters, on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from services.kit.errors import ScopeMissing
from services.kit.paging import page_token_after, parse_page
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto
from services.model.api.convert_adapter import create_command_from_proto
from services.model.api.convert_result import adapter_to_proto, event_to_proto
from services.model.application.create_adapter import CreateAdapter
from services.model.application.delete_adapter import DeleteAdapter
from services.model.application.directory import AdapterDirectory, sort_key
from twinkle.api.model.v1 import adapter_service_pb2 as wire
from twinkle.api.model.v1 import adapter_service_pb2_grpc

Context = grpc.aio.ServicerContext


class AdapterServicer(adapter_service_pb2_grpc.AdapterServiceServicer):
    """Unpacks, delegates, packs."""

    def __init__(self, directory: AdapterDirectory, create: CreateAdapter, delete: DeleteAdapter) -> None:
        """Serve the verbs given."""
        self._directory = directory
        self._create = create
        self._delete = delete

    async def CreateAdapter(  # noqa: N802 - the contract's name
        self, request: wire.CreateAdapterRequest, context: Context[Any, Any]
    ) -> wire.CreateAdapterResponse:
        """Create an adapter."""
        adapter = await self._create(current_caller(), create_command_from_proto(request))
        return wire.CreateAdapterResponse(adapter=adapter_to_proto(adapter))

    async def GetAdapter(  # noqa: N802 - the contract's name
        self, request: wire.GetAdapterRequest, context: Context[Any, Any]
    ) -> wire.GetAdapterResponse:
        """Get an adapter."""
        adapter = self._directory.get(current_caller(), id_from_proto(request.adapter_id, 'adapter_id'))
        return wire.GetAdapterResponse(adapter=adapter_to_proto(adapter))

    async def ListAdapters(  # noqa: N802 - the contract's name
        self, request: wire.ListAdaptersRequest, context: Context[Any, Any]
    ) -> wire.ListAdaptersResponse:
        """List the caller's adapters."""
        caller = current_caller()
        query = f'ListAdapters/{caller.tenant_id}'
        page = parse_page(request.page_size, request.page_token, query=query)
        adapters = self._directory.list(caller, after=page.after, size=page.size + 1)
        response = wire.ListAdaptersResponse(adapters=map(adapter_to_proto, adapters[: page.size]))
        if len(adapters) > page.size:
            response.next_page_token = page_token_after(sort_key(adapters[page.size - 1]), query=query)
        return response

    async def DeleteAdapter(  # noqa: N802 - the contract's name
        self, request: wire.DeleteAdapterRequest, context: Context[Any, Any]
    ) -> wire.DeleteAdapterResponse:
        """Delete an adapter."""
        await self._delete(current_caller(), id_from_proto(request.adapter_id, 'adapter_id'))
        return wire.DeleteAdapterResponse()

    async def WatchAdapters(  # noqa: N802 - the contract's name
        self, request: wire.WatchAdaptersRequest, context: Context[Any, Any]
    ) -> AsyncIterator[wire.WatchAdaptersResponse]:
        """Follow all adapters, for internal callers."""
        if not current_caller().is_internal:
            raise ScopeMissing('internal')
        async with aclosing(self._directory.watch(request.resume_token)) as events:
            async for event in events:
                yield event_to_proto(event)
