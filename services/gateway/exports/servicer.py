"""Serves the contract for exports, and converts its messages.

Functions raise InvalidField if a field is missing, too long, or has a control character.
"""

# ruff: noqa: N802 (the methods have the contract's names)

from twinkle.api.error.v1 import error_reason_pb2
from twinkle.api.gateway.v1 import export_service_pb2 as messages
from twinkle.api.gateway.v1 import export_service_pb2_grpc
from twinkle_services.gateway.exports.exports import Exports
from twinkle_services.gateway.exports.rules import Export, ExportRequest, ExportState
from twinkle_services.gateway.page_tokens import next_token, page_from_proto
from twinkle_services.gateway.paging import Listing
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto, text_from_proto, timestamp_to_proto

_PATH_LENGTH = 512
_STATES = {
    ExportState.WAITING: messages.EXPORT_STATE_WAITING,
    ExportState.RUNNING: messages.EXPORT_STATE_RUNNING,
    ExportState.DONE: messages.EXPORT_STATE_DONE,
    ExportState.FAILED: messages.EXPORT_STATE_FAILED,
    ExportState.CANCELLED: messages.EXPORT_STATE_CANCELLED,
}


class ExportServicer(export_service_pb2_grpc.ExportServiceServicer):
    """Implements `ExportService`."""

    def __init__(self, exports: Exports) -> None:
        self._exports = exports

    async def StartExport(self, request: messages.StartExportRequest, context: Context) -> messages.StartExportResponse:
        export = await self._exports.start(current_caller(), export_request_from_proto(request))
        return messages.StartExportResponse(export=export_to_proto(export))

    async def GetExport(self, request: messages.GetExportRequest, context: Context) -> messages.GetExportResponse:
        export = await self._exports.get(current_caller(), id_from_proto(request.export_id, 'export_id'))
        return messages.GetExportResponse(export=export_to_proto(export))

    async def ListExports(self, request: messages.ListExportsRequest, context: Context) -> messages.ListExportsResponse:
        query = ('ListExports', current_caller().tenant_id, request.checkpoint_path)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._exports.list(current_caller(), page, checkpoint_path=export_filter_from_proto(request))
        return export_listing_to_proto(listing, query=query)

    async def CancelExport(
        self, request: messages.CancelExportRequest, context: Context
    ) -> messages.CancelExportResponse:
        export = await self._exports.cancel(current_caller(), id_from_proto(request.export_id, 'export_id'))
        return messages.CancelExportResponse(export=export_to_proto(export))


def export_request_from_proto(request: messages.StartExportRequest) -> ExportRequest:
    """Return the request for an export, which is private by default."""
    return ExportRequest(
        request_id=id_from_proto(request.request_id, 'request_id'),
        checkpoint_path=text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH),
        target=text_from_proto(request.target, 'target', limit=_PATH_LENGTH),
        hub_token=text_from_proto(request.hub_token, 'hub_token', limit=_PATH_LENGTH),
        is_private=request.is_private if request.HasField('is_private') else True,
    )


def export_filter_from_proto(request: messages.ListExportsRequest) -> str | None:
    """Return the path of the checkpoint whose exports are requested; None for all checkpoints."""
    return text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH) or None


def export_listing_to_proto(listing: Listing[Export], *, query: tuple[str, ...]) -> messages.ListExportsResponse:
    """Return the message of a page, with a token for the next page of `query`."""
    return messages.ListExportsResponse(
        exports=map(export_to_proto, listing.items), next_page_token=next_token(listing.next_cursor, query=query)
    )


def export_to_proto(export: Export) -> messages.Export:
    """Return the message of an export, without the hub's token."""
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
    reasons, name = error_reason_pb2.ErrorReason, f'ERROR_REASON_{error.reason}'
    if name not in reasons.keys():  # noqa: SIM118 (an enum, not a dict)
        # A newer gateway stored a reason that this version does not define.
        name = 'ERROR_REASON_INTERNAL'
    return messages.ExportFailure(reason=reasons.Value(name), message=str(error))
