"""Messages become orders of exports with every field checked, and exports become messages without their tokens."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from services.gateway.exports.convert import (
    export_filter_from_proto,
    export_listing_to_proto,
    export_order_from_proto,
    export_to_proto,
)
from services.gateway.exports.rules import Export, ExportState
from services.gateway.paging import Cursor, Listing
from services.kit.errors import Code, InvalidField, ServiceUnreachable
from services.kit.rpc.status import ForwardedError
from twinkle.api.error.v1 import error_reason_pb2
from twinkle.api.gateway.v1 import export_service_pb2 as messages

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
def test_every_state_has_its_number(state: ExportState) -> None:
    """By the same name; no token goes with it, sealed or not."""
    message = export_to_proto(replace(EXPORT, state=state))
    assert messages.ExportState.Name(message.state) == f'EXPORT_STATE_{state.name}'
    assert b'sealed' not in message.SerializeToString()


def test_a_failure_has_the_reason_of_the_contract() -> None:
    """One that this gateway cannot name is internal to it."""
    known = export_to_proto(replace(EXPORT, error=ServiceUnreachable('hub')))
    assert known.failure.reason == error_reason_pb2.ERROR_REASON_SERVICE_UNREACHABLE
    newer = ForwardedError(Code.ABORTED, 'OF_TOMORROW', 'told by a newer gateway', {})
    unknown = export_to_proto(replace(EXPORT, error=newer))
    assert unknown.failure.reason == error_reason_pb2.ERROR_REASON_INTERNAL
    assert not export_to_proto(EXPORT).HasField('failure')


def test_a_repository_is_private_unless_asked_otherwise() -> None:
    """Unset is not the same as false."""
    request = messages.StartExportRequest(request_id='rq-1')
    assert export_order_from_proto(request).is_private
    request.is_private = False
    assert not export_order_from_proto(request).is_private


@pytest.mark.parametrize('field', ['request_id', 'checkpoint_path', 'target', 'hub_token'])
def test_a_field_that_is_too_long_is_refused_by_its_name(field: str) -> None:
    """None of them is kept without a limit."""
    request = messages.StartExportRequest(request_id='rq-1')
    setattr(request, field, 'x' * 5000)
    with pytest.raises(InvalidField) as caught:
        export_order_from_proto(request)
    assert caught.value.field == field


def test_an_empty_filter_asks_for_all() -> None:
    """Any other is a path, of bounded length."""
    assert export_filter_from_proto(messages.ListExportsRequest()) is None
    asked = messages.ListExportsRequest(checkpoint_path=EXPORT.checkpoint_path)
    assert export_filter_from_proto(asked) == EXPORT.checkpoint_path
    with pytest.raises(InvalidField):
        export_filter_from_proto(messages.ListExportsRequest(checkpoint_path='x' * 5000))


def test_a_page_says_whether_there_is_another() -> None:
    """By a token; the last page has none."""
    last = export_listing_to_proto(Listing(items=[EXPORT], next_cursor=None), query=('all',))
    assert (len(last.exports), last.next_page_token) == (1, '')
    first = export_listing_to_proto(Listing(items=[EXPORT], next_cursor=Cursor(BEGIN, 'ex-1')), query=('all',))
    assert first.next_page_token
