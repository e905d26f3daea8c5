"""Paging through things that are listed newest first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

Item = TypeVar('Item')


@dataclass(frozen=True, order=True)
class Cursor:
    """Where an item stands in its list: by time of creation, then id."""

    create_time: datetime
    """UTC."""
    item_id: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a list is asked for."""

    size: int
    """Most items to return, at least 1."""
    after: Cursor | None = None
    """The last item of the page before; None for the first page."""


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[Item]):
    """One page of a list."""

    items: Sequence[Item]
    """Newest first."""
    next_cursor: Cursor | None
    """What the next page begins after; None on the last."""


@dataclass(frozen=True)
class Slice:
    """What a list is asked for by place instead of by what came before."""

    offset: int
    """How many to pass over."""
    limit: int
    """Most items to return."""


@dataclass(frozen=True)
class Counted(Generic[Item]):
    """A part of a list."""

    items: Sequence[Item]
    """Newest first."""
    total_count: int
    """How many there are in all."""


def list_page(found: Sequence[Item], page: Page, *, cursor_of: Callable[[Item], Cursor]) -> Listing[Item]:
    """Return the page out of `found`, which holds one item more than the page where there is a next one."""
    items = found[: page.size]
    return Listing(items=items, next_cursor=cursor_of(items[-1]) if len(found) > page.size else None)
