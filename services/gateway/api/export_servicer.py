"""Serves the contract for exports."""

from typing import Any

import grpc

from services.gateway.api import convert
from services.gateway.application.start_export import ExportOrder, Exports, StartExport
from services.gateway.domain.export import Export, ExportState
from services.kit.errors import DomainError
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto, text_from_proto, timestamp_to_proto
from twinkle.api.error.v1 import error_reason_pb2
from twinkle.api.gateway.v1 import export_service_pb2 as messages
from twinkle.api.gateway.v1 import export_service_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_PATH_LENGTH = 512
_STATES = {
    ExportState.WAITING: messages.EXPORT_STATE_WAITING,
    ExportState.RUNNING: messages.EXPORT_STATE_RUNNING,
    ExportState.DONE: messages.EXPORT_STATE_DONE,
    ExportState.FAILED: messages.EXPORT_STATE_FAILED,
    ExportState.CANCELLED: messages.EXPORT_STATE_CANCELLED,
}


class ExportServicer(export_service_pb2_grpc.ExportServiceServicer):
    """Converts, calls the verb, converts."""

    def __init__(self, start: StartExport, exports: Exports) -> None:
        """Serve these verbs."""
        self._start = start
        self._exports = exports

    async def StartExport(  # noqa: N802 (the contract's name)
        self, request: messages.StartExportRequest, context: _Context
    ) -> messages.StartExportResponse:
        """Accept an export."""
        export = await self._start(current_caller(), _order_from_proto(request))
        return messages.StartExportResponse(export=_export_to_proto(export))

    async def GetExport(  # noqa: N802 (the contract's name)
        self, request: messages.GetExportRequest, context: _Context
    ) -> messages.GetExportResponse:
        """Show an export."""
        export = await self._exports.get(current_caller(), id_from_proto(request.export_id, 'export_id'))
        return messages.GetExportResponse(export=_export_to_proto(export))

    async def ListExports(  # noqa: N802 (the contract's name)
        self, request: messages.ListExportsRequest, context: _Context
    ) -> messages.ListExportsResponse:
        """List the caller's exports."""
        query = ('ListExports', current_caller().tenant_id, request.checkpoint_path)
        page = convert.page_from_proto(request.page_size, request.page_token, query=query)
        path = text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH) or None
        listing = await self._exports.list_page(current_caller(), page, checkpoint_path=path)
        return messages.ListExportsResponse(
            exports=map(_export_to_proto, listing.items),
            next_page_token=convert.next_token(listing.next_cursor, query=query),
        )

    async def CancelExport(  # noqa: N802 (the contract's name)
        self, request: messages.CancelExportRequest, context: _Context
    ) -> messages.CancelExportResponse:
        """End an export."""
        export = await self._exports.cancel(current_caller(), id_from_proto(request.export_id, 'export_id'))
        return messages.CancelExportResponse(export=_export_to_proto(export))


def _order_from_proto(request: messages.StartExportRequest) -> ExportOrder:
    return ExportOrder(
        request_id=id_from_proto(request.request_id, 'request_id'),
        checkpoint_path=text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH),
        target=text_from_proto(request.target, 'target', limit=_PATH_LENGTH),
        hub_token=text_from_proto(request.hub_token, 'hub_token', limit=_PATH_LENGTH),
        is_private=request.is_private if request.HasField('is_private') else True,
    )


def _export_to_proto(export: Export) -> messages.Export:
    return messages.Export(
        export_id=export.export_id,
        checkpoint_path=export.checkpoint_path,
        digest=export.digest,
        target=export.target,
        state=_STATES[export.state],
        read_bytes=export.read_bytes,
        size_bytes=export.size_bytes,
        attempt_count=export.attempt_count,
        url=export.url,
        commit=export.commit,
        failure=None if export.error is None else _failure_to_proto(export.error),
        create_time=timestamp_to_proto(export.create_time),
        update_time=timestamp_to_proto(export.update_time),
    )


def _failure_to_proto(error: DomainError) -> messages.ExportFailure:
    name = f'ERROR_REASON_{error.reason}'
    reasons = error_reason_pb2.ErrorReason
    reason = reasons.Value(name) if name in reasons.keys() else reasons.Value('ERROR_REASON_INTERNAL')  # noqa: SIM118 (an enum, no dict)
    return messages.ExportFailure(reason=reason, message=str(error))
