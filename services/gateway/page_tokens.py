"""Converts page tokens of requests to pages, and cursors to page tokens of responses."""

import copy
import json
from datetime import datetime, timedelta
from typing import Any

from twinkle_services.gateway.paging import Cursor, Page
from twinkle_services.kit.errors import InvalidField, InvalidPageToken
from twinkle_services.kit.paging import page_token_after, parse_page
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import MAX_ID_LENGTH, fingerprint_of, text_from_proto

_MAX_ITEM_ID_LENGTH = 2 * MAX_ID_LENGTH
"""Maximum length of the id of a listed item; the id of a checkpoint contains the id of its run and its name."""


def query_of(request: Any) -> tuple[str, ...]:
    """Return the query of a List request: the method, the tenant of the current caller, and all filters."""
    filters = copy.deepcopy(request)
    filters.ClearField('page_size')
    filters.ClearField('page_token')
    return (type(request).__name__, current_caller().tenant_id, fingerprint_of(filters))


def page_from_proto(page_size: int, page_token: str, *, query: tuple[str, ...]) -> Page:
    """Return the requested page.

    Args:
        page_size: 0 selects the default.
        page_token: empty, or a result of `next_token` for the same query.
        query: all other properties that determine the list: its name, the tenant and the filters.

    Raises:
        InvalidField: the size is negative.
        InvalidPageToken: the token was not issued for this query.
    """
    page = parse_page(page_size, page_token, query=json.dumps(query), key_types=(str, str))
    if page.after is None:
        return Page(size=page.size)
    try:
        moment, item_id = map(str, page.after)
        item_id = text_from_proto(item_id, 'page_token', limit=_MAX_ITEM_ID_LENGTH)
        cursor = Cursor(datetime.fromisoformat(moment), item_id)
    except (ValueError, InvalidField) as error:
        raise InvalidPageToken() from error
    if cursor.create_time.utcoffset() != timedelta():
        raise InvalidPageToken()
    return Page(size=page.size, after=cursor)


def next_token(cursor: Cursor | None, *, query: tuple[str, ...]) -> str:
    """Return the token of the page after `cursor`; empty on the last page."""
    after = None if cursor is None else (cursor.create_time.isoformat(), cursor.item_id)
    return page_token_after(after, query=json.dumps(query))
