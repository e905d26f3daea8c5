"""Messages become values with every field checked, and values become messages."""

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import wire as convert
from services.gateway.keys.api_key import Scope
from services.gateway.paging import Cursor
from services.kit.errors import InvalidArgument, InvalidField, InvalidPageToken
from twinkle.api.gateway.v1 import key_service_pb2, session_service_pb2

QUERY = ('ListRuns', 'alice', '')


@pytest.mark.parametrize('tenant_id', ['', 'Upper', 'under_score', 'a' * 65, 'a\n', 'ä'])
def test_bad_tenant_id_is_refused(tenant_id: str) -> None:
    """Only 1 to 64 of lower-case letters, digits and '-' name a tenant."""
    with pytest.raises(InvalidField) as caught:
        convert.tenant_id_from_proto(tenant_id)
    assert caught.value.field == 'tenant_id'


@pytest.mark.parametrize(
    ('change', 'field'),
    [
        ({'scopes': []}, 'scopes'),
        ({'scopes': [1, 0]}, 'scopes[1]'),
        ({'scopes': [99]}, 'scopes[0]'),
        ({'ttl': Duration()}, 'ttl'),
        ({'ttl': Duration(seconds=-5)}, 'ttl'),
        ({'ttl': Duration(seconds=1 << 60)}, 'ttl'),
        ({'display_name': 'x' * 257}, 'display_name'),
    ],
)
def test_bad_key_order_names_the_field(change: dict[str, Any], field: str) -> None:
    """Each wrong field is refused by its path."""
    good: dict[str, Any] = {'tenant_id': 'alice', 'scopes': [key_service_pb2.SCOPE_TRAIN]}
    with pytest.raises(InvalidField) as caught:
        convert.key_order_from_proto(key_service_pb2.CreateKeyRequest(**{**good, **change}))
    assert caught.value.field == field


def test_key_order_without_ttl_lasts_for_ever() -> None:
    """Unset is not zero."""
    request = key_service_pb2.CreateKeyRequest(tenant_id='alice', scopes=[1, 2, 2], ttl=Duration(seconds=60))
    assert convert.key_order_from_proto(request).ttl == timedelta(minutes=1)
    request.ClearField('ttl')
    order = convert.key_order_from_proto(request)
    assert order.ttl is None
    assert order.scopes == {Scope.TRAIN, Scope.SAMPLE}


@pytest.mark.parametrize(
    ('change', 'field'),
    [
        ({'request_id': ''}, 'request_id'),
        ({'client': 'x' * 257}, 'client'),
        ({'client': 'a\0b'}, 'client'),
        ({'user_metadata': {str(number): '' for number in range(65)}}, 'user_metadata'),
        ({'user_metadata': {'k': 'v' * 4097}}, 'user_metadata[k]'),
    ],
)
def test_bad_session_order_names_the_field(change: dict[str, Any], field: str) -> None:
    """Each wrong field is refused by its path."""
    good: dict[str, Any] = {'request_id': 'rq', 'client': 'test'}
    with pytest.raises(InvalidField) as caught:
        convert.session_order_from_proto(session_service_pb2.CreateSessionRequest(**{**good, **change}))
    assert caught.value.field == field


def test_unknown_finish_reason_is_refused() -> None:
    """A number outside the contract is no reason."""
    with pytest.raises(InvalidField):
        convert.finish_reason_from_proto(99)  # type: ignore[arg-type]


@given(st.datetimes(timezones=st.just(UTC)), st.text(st.characters(min_codepoint=32, codec='utf-8'), max_size=256))
def test_page_token_leads_back_to_its_cursor(moment: datetime, item_id: str) -> None:
    """A token made for a query gives the same cursor for that query."""
    cursor = Cursor(moment, item_id)
    page = convert.page_from_proto(7, convert.next_token(cursor, query=QUERY), query=QUERY)
    assert (page.size, page.after) == (7, cursor)


def test_page_token_of_another_query_is_refused() -> None:
    """Neither another tenant nor another filter may use a token."""
    token = convert.next_token(Cursor(datetime(2026, 1, 1, tzinfo=UTC), 'a'), query=QUERY)
    with pytest.raises(InvalidPageToken):
        convert.page_from_proto(0, token, query=('ListRuns', 'bob', ''))


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_forged_page_token_is_refused_and_nothing_else_happens(after: Any) -> None:
    """Whatever stands in a token with the right digest, it is a good cursor or a bad token."""
    digest = json.loads(base64.urlsafe_b64decode(convert.next_token(Cursor(datetime.now(UTC), 'a'), query=QUERY)))[0]
    token = base64.urlsafe_b64encode(json.dumps([digest, after]).encode()).decode()
    try:
        page = convert.page_from_proto(0, token, query=QUERY)
    except InvalidPageToken:
        return
    assert page.after is None


@given(st.text(max_size=40))
def test_any_text_as_token_is_refused_politely(token: str) -> None:
    """Garbage is a bad argument, never a defect."""
    try:
        convert.page_from_proto(0, token, query=QUERY)
    except InvalidArgument:
        return
    assert token == ''
