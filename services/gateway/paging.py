"""Values for lists that are read page by page, newest item first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

Item = TypeVar('Item')


@dataclass(frozen=True, order=True)
class Cursor:
    """Position of an item in its list: creation time, then id."""

    create_time: datetime
    """UTC."""
    item_id: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """Request for one page, by cursor."""

    size: int
    """Maximum number of items to return, at least 1."""
    after: Cursor | None = None
    """Last item of the previous page; None for the first page."""


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[Item]):
    """One page of a list."""

    items: Sequence[Item]
    """Newest first."""
    next_cursor: Cursor | None
    """Cursor for the next page; None on the last page."""


@dataclass(frozen=True)
class Slice:
    """Request for a part of a list, by offset."""

    offset: int
    """Number of items to skip."""
    limit: int
    """Maximum number of items to return."""


@dataclass(frozen=True)
class Counted(Generic[Item]):
    """Part of a list, with the length of the list."""

    items: Sequence[Item]
    """Newest first."""
    total_count: int
    """Number of items in the full list."""


def list_page(found: Sequence[Item], page: Page, *, cursor_of: Callable[[Item], Cursor]) -> Listing[Item]:
    """Return `found` as one page; `found` has one item more than `page.size` if there is a next page."""
    items = found[: page.size]
    return Listing(items=items, next_cursor=cursor_of(items[-1]) if len(found) > page.size else None)
