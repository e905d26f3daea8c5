"""Serves the contract for exports."""

# ruff: noqa: N802 (the methods have the contract's names)

from typing import Any

import grpc

from services.gateway.exports.cancel_export import CancelExport
from services.gateway.exports.convert import (
    export_filter_from_proto,
    export_listing_to_proto,
    export_order_from_proto,
    export_to_proto,
)
from services.gateway.exports.get_export import GetExport
from services.gateway.exports.list_exports import ListExports
from services.gateway.exports.start_export import StartExport
from services.gateway.page_tokens import page_from_proto
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto
from twinkle.api.gateway.v1 import export_service_pb2 as messages
from twinkle.api.gateway.v1 import export_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class ExportServicer(export_service_pb2_grpc.ExportServiceServicer):
    """Converts, calls the verb, converts."""

    def __init__(self, *, start: StartExport, get: GetExport, list_exports: ListExports, cancel: CancelExport) -> None:
        """Serve these verbs."""
        self._start = start
        self._get = get
        self._list_exports = list_exports
        self._cancel = cancel

    async def StartExport(self, request: messages.StartExportRequest, context: Context) -> messages.StartExportResponse:
        """Accept an export."""
        export = await self._start(current_caller(), export_order_from_proto(request))
        return messages.StartExportResponse(export=export_to_proto(export))

    async def GetExport(self, request: messages.GetExportRequest, context: Context) -> messages.GetExportResponse:
        """Show an export."""
        export = await self._get(current_caller(), id_from_proto(request.export_id, 'export_id'))
        return messages.GetExportResponse(export=export_to_proto(export))

    async def ListExports(self, request: messages.ListExportsRequest, context: Context) -> messages.ListExportsResponse:
        """List the caller's exports."""
        query = ('ListExports', current_caller().tenant_id, request.checkpoint_path)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        path = export_filter_from_proto(request)
        listing = await self._list_exports(current_caller(), page, checkpoint_path=path)
        return export_listing_to_proto(listing, query=query)

    async def CancelExport(
        self, request: messages.CancelExportRequest, context: Context
    ) -> messages.CancelExportResponse:
        """End an export."""
        export = await self._cancel(current_caller(), id_from_proto(request.export_id, 'export_id'))
        return messages.CancelExportResponse(export=export_to_proto(export))
