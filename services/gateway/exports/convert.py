"""Converts messages of the export contract, with every check of their fields."""

from services.gateway.exports.rules import Export, ExportRequest, ExportState
from services.gateway.page_tokens import next_token
from services.gateway.paging import Listing
from services.kit.errors import DomainError
from services.kit.rpc.fields import id_from_proto, text_from_proto, timestamp_to_proto
from twinkle.api.error.v1 import error_reason_pb2
from twinkle.api.gateway.v1 import export_service_pb2 as messages

_PATH_LENGTH = 512
_STATES = {
    ExportState.WAITING: messages.EXPORT_STATE_WAITING,
    ExportState.RUNNING: messages.EXPORT_STATE_RUNNING,
    ExportState.DONE: messages.EXPORT_STATE_DONE,
    ExportState.FAILED: messages.EXPORT_STATE_FAILED,
    ExportState.CANCELLED: messages.EXPORT_STATE_CANCELLED,
}


def export_request_from_proto(request: messages.StartExportRequest) -> ExportRequest:
    """Return the request for an export.

    Raises:
        InvalidField: a field is missing or too long.
    """
    return ExportRequest(
        request_id=id_from_proto(request.request_id, 'request_id'),
        checkpoint_path=text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH),
        target=text_from_proto(request.target, 'target', limit=_PATH_LENGTH),
        hub_token=text_from_proto(request.hub_token, 'hub_token', limit=_PATH_LENGTH),
        is_private=request.is_private if request.HasField('is_private') else True,
    )


def export_filter_from_proto(request: messages.ListExportsRequest) -> str | None:
    """Return the path of the checkpoint whose exports are requested; None for all checkpoints.

    Raises:
        InvalidField: the path is too long.
    """
    return text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH) or None


def export_listing_to_proto(listing: Listing[Export], *, query: tuple[str, ...]) -> messages.ListExportsResponse:
    """Return the message of a page, with a token for the next page of `query`."""
    return messages.ListExportsResponse(
        exports=map(export_to_proto, listing.items),
        next_page_token=next_token(listing.next_cursor, query=query),
    )


def export_to_proto(export: Export) -> messages.Export:
    """Return the message of an export, without its token."""
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
    # A newer gateway may have stored a reason that this version does not know.
    is_known = name in reasons.keys()  # noqa: SIM118 (an enum, not a dict)
    reason = reasons.Value(name if is_known else 'ERROR_REASON_INTERNAL')
    return messages.ExportFailure(reason=reason, message=str(error))
