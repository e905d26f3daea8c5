"""Serves the contract for exports."""

# ruff: noqa: N802 (the methods have the contract's names)

from typing import Any

import grpc

from services.gateway.exports import convert
from services.gateway.exports.exports import Exports
from services.gateway.page_tokens import page_from_proto
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto
from twinkle.api.gateway.v1 import export_service_pb2 as messages
from twinkle.api.gateway.v1 import export_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class ExportServicer(export_service_pb2_grpc.ExportServiceServicer):
    """Implements `ExportService`."""

    def __init__(self, exports: Exports) -> None:
        self._exports = exports

    async def StartExport(self, request: messages.StartExportRequest, context: Context) -> messages.StartExportResponse:
        export = await self._exports.start(current_caller(), convert.export_request_from_proto(request))
        return messages.StartExportResponse(export=convert.export_to_proto(export))

    async def GetExport(self, request: messages.GetExportRequest, context: Context) -> messages.GetExportResponse:
        export = await self._exports.get(current_caller(), id_from_proto(request.export_id, 'export_id'))
        return messages.GetExportResponse(export=convert.export_to_proto(export))

    async def ListExports(self, request: messages.ListExportsRequest, context: Context) -> messages.ListExportsResponse:
        query = ('ListExports', current_caller().tenant_id, request.checkpoint_path)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        path = convert.export_filter_from_proto(request)
        listing = await self._exports.list(current_caller(), page, checkpoint_path=path)
        return convert.export_listing_to_proto(listing, query=query)

    async def CancelExport(
        self, request: messages.CancelExportRequest, context: Context
    ) -> messages.CancelExportResponse:
        export = await self._exports.cancel(current_caller(), id_from_proto(request.export_id, 'export_id'))
        return messages.CancelExportResponse(export=convert.export_to_proto(export))
