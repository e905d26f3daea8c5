"""Servicer of AdapterService, which manages adapters, leases and takeovers, and estimates the cost of runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from twinkle.api.model.v1 import adapter_pb2, adapter_service_pb2_grpc
from twinkle.api.model.v1 import adapter_service_pb2 as wire
from twinkle_services.kit.paging import page_token_after, parse_page
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto, name_from_proto
from twinkle_services.kit.rpc.message_bounds import convert_large
from twinkle_services.model.api.convert_adapter import (
    cost_to_proto,
    create_request_from_proto,
    estimate_request_from_proto,
    save_prefix_from_proto,
    session_id_from_proto,
)
from twinkle_services.model.api.convert_result import adapter_to_proto, event_to_proto
from twinkle_services.model.application.directory import sort_key
from twinkle_services.model.application.service import ModelService
from twinkle_services.model.domain.adapter import Adapter

Context = grpc.aio.ServicerContext


class AdapterServicer(adapter_service_pb2_grpc.AdapterServiceServicer):
    """Converts messages and calls the application."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def CreateAdapter(  # noqa: N802 - name of the RPC
        self, request: wire.CreateAdapterRequest, context: Context[Any, Any]
    ) -> wire.CreateAdapterResponse:
        converted = await convert_large(create_request_from_proto, request)
        adapter = await self._service.create_adapter(current_caller(), converted)
        warnings = self._service.create_adapter.warnings_of(adapter.adapter_id)
        return wire.CreateAdapterResponse(adapter=self._message(adapter), warnings=warnings)

    async def GetAdapter(  # noqa: N802 - name of the RPC
        self, request: wire.GetAdapterRequest, context: Context[Any, Any]
    ) -> wire.GetAdapterResponse:
        adapter = self._service.directory.get(current_caller(), id_from_proto(request.adapter_id, 'adapter_id'))
        return wire.GetAdapterResponse(adapter=self._message(adapter))

    async def ListAdapters(  # noqa: N802 - name of the RPC
        self, request: wire.ListAdaptersRequest, context: Context[Any, Any]
    ) -> wire.ListAdaptersResponse:
        caller, session_id = current_caller(), session_id_from_proto(request.session_id)
        query = f'ListAdapters/{caller.tenant_id}/{session_id}'
        page = parse_page(request.page_size, request.page_token, query=query, key_types=(str, str))
        adapters = self._service.directory.list(caller, after=page.after, size=page.size + 1, session_id=session_id)
        response = wire.ListAdaptersResponse(adapters=map(self._message, adapters[: page.size]))
        if len(adapters) > page.size:
            response.next_page_token = page_token_after(sort_key(adapters[page.size - 1]), query=query)
        return response

    async def DeleteAdapter(  # noqa: N802 - name of the RPC
        self, request: wire.DeleteAdapterRequest, context: Context[Any, Any]
    ) -> wire.DeleteAdapterResponse:
        await self._service.delete_adapter(current_caller(), id_from_proto(request.adapter_id, 'adapter_id'))
        return wire.DeleteAdapterResponse()

    async def ParkAdapter(  # noqa: N802 - name of the RPC
        self, request: wire.ParkAdapterRequest, context: Context[Any, Any]
    ) -> wire.ParkAdapterResponse:
        adapter_id = id_from_proto(request.adapter_id, 'adapter_id')
        prefix = save_prefix_from_proto(request.save_prefix)
        adapter = await self._service.park_adapter(current_caller(), adapter_id, save_prefix=prefix)
        return wire.ParkAdapterResponse(adapter=self._message(adapter))

    async def EndLease(  # noqa: N802 - name of the RPC
        self, request: wire.EndLeaseRequest, context: Context[Any, Any]
    ) -> wire.EndLeaseResponse:
        adapter_id = await self._service.end_lease(current_caller(), request.base_model)
        return wire.EndLeaseResponse(adapter_id=adapter_id or '')

    async def TakeOver(  # noqa: N802 - name of the RPC
        self, request: wire.TakeOverRequest, context: Context[Any, Any]
    ) -> wire.TakeOverResponse:
        trainer = name_from_proto(request.trainer, 'trainer')
        count = await self._service.take_over(current_caller(), request.base_model, trainer)
        return wire.TakeOverResponse(adapter_count=count)

    async def Estimate(  # noqa: N802 - name of the RPC
        self, request: wire.EstimateRequest, context: Context[Any, Any]
    ) -> wire.EstimateResponse:
        converted = await convert_large(estimate_request_from_proto, request)
        return cost_to_proto(await self._service.estimate(current_caller(), converted))

    async def WatchAdapters(  # noqa: N802 - name of the RPC
        self, request: wire.WatchAdaptersRequest, context: Context[Any, Any]
    ) -> AsyncIterator[wire.WatchAdaptersResponse]:
        is_reports_only = request.is_reports_only
        watched = self._service.directory.watch(current_caller(), request.resume_token, is_reports_only=is_reports_only)
        async with aclosing(watched) as events:
            async for event in events:
                yield event_to_proto(event, are_reports_included=is_reports_only)

    def _message(self, adapter: Adapter) -> adapter_pb2.Adapter:
        return adapter_to_proto(adapter, is_parked=not self._service.is_resident(adapter.adapter_id))
