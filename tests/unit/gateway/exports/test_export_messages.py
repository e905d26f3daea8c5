"""Conversion of export messages, with checks of all fields."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from twinkle.api.error.v1 import error_reason_pb2
from twinkle.api.gateway.v1 import export_service_pb2 as messages
from twinkle_services.gateway.exports.rules import Export, ExportState
from twinkle_services.gateway.exports.servicer import (
    export_filter_from_proto,
    export_listing_to_proto,
    export_request_from_proto,
    export_to_proto,
)
from twinkle_services.gateway.paging import Cursor, Listing
from twinkle_services.kit.errors import Code, InvalidField, ServiceUnreachable
from twinkle_services.kit.rpc.status import ForwardedError

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
EXPORT = Export(
    export_id='ex-1',
    tenant_id='alice',
    request_id='rq-1',
    checkpoint_path='twinkle://ad-1/weights/best',
    digest='ab',
    target='hf://org/name',
    is_private=True,
    sealed_token=b'sealed',
    create_time=BEGIN,
    update_time=BEGIN,
    due_time=BEGIN,
)


@pytest.mark.parametrize('state', ExportState)
def test_every_state_converts_to_its_number(state: ExportState) -> None:
    """Each state converts to the number of the same name, and the message contains no token."""
    message = export_to_proto(replace(EXPORT, state=state))
    assert messages.ExportState.Name(message.state) == f'EXPORT_STATE_{state.name}'
    assert b'sealed' not in message.SerializeToString()


def test_failure_reason_converts_by_name() -> None:
    """The reason of an error converts by name, and an unknown reason converts to INTERNAL."""
    known = export_to_proto(replace(EXPORT, error=ServiceUnreachable('hub')))
    assert known.failure.reason == error_reason_pb2.ERROR_REASON_SERVICE_UNREACHABLE
    newer = ForwardedError(Code.ABORTED, 'UNKNOWN_REASON', 'from a newer gateway', {})
    unknown = export_to_proto(replace(EXPORT, error=newer))
    assert unknown.failure.reason == error_reason_pb2.ERROR_REASON_INTERNAL
    assert not export_to_proto(EXPORT).HasField('failure')


def test_repository_is_private_by_default() -> None:
    """An unset `is_private` converts to True, and False stays False."""
    request = messages.StartExportRequest(request_id='rq-1')
    assert export_request_from_proto(request).is_private
    request.is_private = False
    assert not export_request_from_proto(request).is_private


@pytest.mark.parametrize('field', ['request_id', 'checkpoint_path', 'target', 'hub_token'])
def test_error_for_a_long_field_names_the_field(field: str) -> None:
    """Each text field has a length limit, and the error names the field."""
    request = messages.StartExportRequest(request_id='rq-1')
    setattr(request, field, 'x' * 5000)
    with pytest.raises(InvalidField) as caught:
        export_request_from_proto(request)
    assert caught.value.field == field


def test_empty_filter_selects_all_exports() -> None:
    """An unset path converts to None, a set path is unchanged, and a path that is too long is refused."""
    assert export_filter_from_proto(messages.ListExportsRequest()) is None
    request = messages.ListExportsRequest(checkpoint_path=EXPORT.checkpoint_path)
    assert export_filter_from_proto(request) == EXPORT.checkpoint_path
    with pytest.raises(InvalidField):
        export_filter_from_proto(messages.ListExportsRequest(checkpoint_path='x' * 5000))


def test_page_has_a_token_unless_it_is_the_last() -> None:
    """A page with a next cursor has a page token, and the token of the last page is empty."""
    last = export_listing_to_proto(Listing(items=[EXPORT], next_cursor=None), query=('all',))
    assert (len(last.exports), last.next_page_token) == (1, '')
    first = export_listing_to_proto(Listing(items=[EXPORT], next_cursor=Cursor(BEGIN, 'ex-1')), query=('all',))
    assert first.next_page_token
