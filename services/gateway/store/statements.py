"""Helpers for the statements of all stores: rows to values, upserts, and pages from newest to oldest."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from sqlalchemy import ColumnElement, Select, func, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from services.gateway.paging import Page
from services.gateway.store.base import Base

Value = TypeVar('Value')


def select_values(row_class: type[Base], value_class: type[Any]) -> Select[Any]:
    """Return a query for the columns that are fields of `value_class`."""
    return cast(Select[Any], select(*(getattr(row_class, field.name) for field in fields(value_class))))


def as_row(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copying them."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


async def fetch_one(connection: AsyncConnection, query: Select[Any], value_class: type[Value]) -> Value | None:
    """Return the only row as a value, or None."""
    row = (await connection.execute(query)).mappings().one_or_none()
    return None if row is None else value_class(**cast(dict[str, Any], row))


async def fetch_all(connection: AsyncConnection, query: Select[Any], value_class: type[Value]) -> Sequence[Value]:
    """Return the rows as values."""
    rows = (await connection.execute(query)).mappings().all()
    return [value_class(**cast(dict[str, Any], row)) for row in rows]


def insert_into(connection: AsyncConnection, row_class: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """Return an insert with `on_conflict_*` methods, in the connection's dialect."""
    return (postgresql if connection.dialect.name == 'postgresql' else sqlite).insert(row_class)


def newest_first(
    query: Select[Any], page: Page, *, time: InstrumentedAttribute[Any], item_id: InstrumentedAttribute[str]
) -> Select[Any]:
    """Return `query` for a page and one more item, which tells whether there is a next page, newest first."""
    key: ColumnElement[Any] = tuple_(time, item_id)
    if page.after is not None:
        query = query.where(key < tuple_(page.after.create_time, page.after.item_id))
    return query.order_by(time.desc(), item_id.desc()).limit(page.size + 1)


def has_label(labels: InstrumentedAttribute[Any], label: tuple[str, str], dialect: str) -> ColumnElement[bool]:
    """Return a condition that a column of labels has this label, whose name may contain any characters."""
    expand = func.json_each_text if dialect == 'postgresql' else func.json_each
    entry = expand(labels).table_valued('key', 'value')
    return select(entry.c.key).where(entry.c.key == label[0], entry.c.value == label[1]).exists()
