"""Page tokens: round trips, and tokens that do not belong to a query."""

import base64
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_services.gateway.page_tokens import next_token, page_from_proto
from twinkle_services.gateway.paging import Cursor
from twinkle_services.kit.errors import InvalidArgument, InvalidPageToken
from twinkle_services.kit.names import is_adapter_id, is_name

QUERY = ('ListRuns', 'alice', '')


@given(st.datetimes(timezones=st.just(UTC)), st.text(st.characters(min_codepoint=32, codec='utf-8'), max_size=256))
def test_page_token_converts_back_to_its_cursor(moment: datetime, item_id: str) -> None:
    """A token converts back to its cursor when the query is the same."""
    cursor = Cursor(moment, item_id)
    page = page_from_proto(7, next_token(cursor, query=QUERY), query=QUERY)
    assert (page.size, page.after) == (7, cursor)


def test_page_after_the_longest_checkpoint_id_can_be_requested() -> None:
    """The id of a checkpoint with the longest run id and the longest name is accepted in a token."""
    longest = 'a' * 128
    assert is_adapter_id(longest)
    assert is_name(longest)
    cursor = Cursor(datetime(2026, 1, 1, tzinfo=UTC), f'{longest}/weights/{longest}')
    assert page_from_proto(7, next_token(cursor, query=QUERY), query=QUERY).after == cursor


def test_page_token_of_another_query_is_refused() -> None:
    """A token of one tenant's query is refused for another tenant."""
    token = next_token(Cursor(datetime(2026, 1, 1, tzinfo=UTC), 'a'), query=QUERY)
    with pytest.raises(InvalidPageToken):
        page_from_proto(0, token, query=('ListRuns', 'bob', ''))


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_forged_page_token_is_refused(after: Any) -> None:
    """A token with a correct digest and arbitrary content selects the first page or raises InvalidPageToken."""
    digest = json.loads(base64.urlsafe_b64decode(next_token(Cursor(datetime.now(UTC), 'a'), query=QUERY)))[0]
    token = base64.urlsafe_b64encode(json.dumps([digest, after]).encode()).decode()
    try:
        page = page_from_proto(0, token, query=QUERY)
    except InvalidPageToken:
        return
    assert page.after is None


@given(st.text(max_size=40))
def test_arbitrary_text_as_page_token_is_an_invalid_argument(token: str) -> None:
    """Any text that is neither a token nor empty raises InvalidArgument and no other error."""
    try:
        page_from_proto(0, token, query=QUERY)
    except InvalidArgument:
        return
    assert token == ''
