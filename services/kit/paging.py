"""Page tokens: the start of the next page, bound to the query that created them."""

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass

from twinkle_services.kit.errors import InvalidField, InvalidPageToken

SortKey = tuple[str | int, ...]
"""Values that order a list, such as creation time and id."""

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class Page:
    """A requested page of a list."""

    size: int
    """Maximum number of items, 1 to 1000."""
    after: SortKey | None = None
    """Sort key of the last item of the previous page; None for the first page."""


def parse_page(page_size: int, page_token: str, *, query: str, key_types: tuple[type[str] | type[int], ...]) -> Page:
    """Check the paging fields of a request.

    Args:
        page_size: 0 selects the default of 50; values above 1000 are reduced to 1000.
        page_token: Empty, or a token of `page_token_after` for the same `query`.
        query: All other inputs of the list: method, tenant and filters.
        key_types: Types of the sort key's values, which are checked because tokens are untrusted input.

    Raises:
        InvalidField: The page size is negative.
        InvalidPageToken: The token is malformed, or was created for another query.
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
        # Escapes can spell unpaired surrogates, which databases and messages cannot contain.
        ''.join(map(str, after)).encode()
    except (ValueError, binascii.Error, TypeError, RecursionError) as error:
        raise InvalidPageToken() from error
    return Page(size=size, after=tuple(after))


def page_token_after(after: SortKey | None, *, query: str) -> str:
    """Return the token of the page that begins after the sort key `after`; empty if `after` is not set."""
    if after is None:
        return ''
    return base64.urlsafe_b64encode(json.dumps([_digest(query), after]).encode()).decode('ascii')


def _digest(query: str) -> str:
    return hashlib.blake2s(query.encode(), digest_size=6).hexdigest()
