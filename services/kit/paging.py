"""Page tokens: where the next page begins, tied to the query they were made for."""

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass

from services.kit.errors import InvalidField, InvalidPageToken

SortKey = tuple[str | int, ...]
"""What orders a list: such as time of creation and id."""

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a list method is asked for."""

    size: int
    """Most items to return, 1 to 1000."""
    after: SortKey | None = None
    """Sort key of the last item of the page before; None for the first page."""


def parse_page(page_size: int, page_token: str, *, query: str, key_types: tuple[type[str] | type[int], ...]) -> Page:
    """Check the paging fields of a request.

    Args:
        page_size: 0 means the default of 50; above 1000 is taken as 1000.
        page_token: empty, or from `page_token_after` for the same `query`.
        query: whatever else decides the list (method, tenant, filters).
        key_types: what the list's sort keys consist of; a token is data from outside.

    Raises:
        InvalidField: the page size is negative.
        InvalidPageToken: the token was not made for this query.
    """
    if page_size < 0:
        raise InvalidField('page_size', f'must be at least 0, got {page_size}')
    size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    if not page_token:
        return Page(size=size)
    try:
        digest, after = json.loads(base64.urlsafe_b64decode(page_token.encode('ascii', 'strict')))
        if digest != _digest(query) or [type(part) for part in after] != list(key_types):
            raise InvalidPageToken()
    except (ValueError, binascii.Error, TypeError) as error:
        raise InvalidPageToken() from error
    return Page(size=size, after=tuple(after))


def page_token_after(after: SortKey | None, *, query: str) -> str:
    """Return the token of the page that begins after the sort key `after`; empty where there is none."""
    if after is None:
        return ''
    return base64.urlsafe_b64encode(json.dumps([_digest(query), after]).encode()).decode('ascii')


def _digest(query: str) -> str:
    return hashlib.blake2s(query.encode(), digest_size=6).hexdigest()
