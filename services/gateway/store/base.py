"""Base classes of all tables and stores, column types that several tables use, and helpers for SQL statements."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar, cast

from google.rpc import status_pb2
from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    DateTime,
    Delete,
    Dialect,
    LargeBinary,
    Select,
    String,
    Update,
    and_,
    delete,
    func,
    select,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute
from sqlalchemy.types import TypeDecorator

from twinkle_services.gateway.paging import Cursor, Listing, Page, list_page
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.rpc.status import error_from_status, status_from_error

Member = TypeVar('Member', bound=StrEnum)
Value = TypeVar('Value')
DELETED_AT_ONCE = 500
"""Maximum number of old rows that one transaction deletes, so that other writers wait only briefly."""


class UtcDateTime(TypeDecorator[datetime]):
    """Moment in UTC. SQLite drops time zones, so the zone UTC is added to the values read from it."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class EnumName(TypeDecorator[Member]):
    """Member of a string enum, stored as its value of at most 16 characters."""

    impl = String(16)
    cache_ok = True

    def __init__(self, enum_class: type[Member]) -> None:
        super().__init__()
        # SQLAlchemy computes its cache key from attributes with the same names as the parameters of `__init__`.
        self.enum_class = enum_class

    def process_bind_param(self, value: Member | None, dialect: Dialect) -> str | None:
        return None if value is None else value.value

    def process_result_value(self, value: str | None, dialect: Dialect) -> Member | None:
        return None if value is None else self.enum_class(value)


class TextTuple(TypeDecorator[tuple[str, ...]]):
    """Tuple of strings, stored as a JSON list."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> list[str] | None:
        return None if value is None else list(value)

    def process_result_value(self, value: list[str] | None, dialect: Dialect) -> tuple[str, ...] | None:
        return None if value is None else tuple(value)


class ErrorStatus(TypeDecorator[DomainError]):
    """Domain error, stored as a serialized `google.rpc.Status`.

    Code, reason, message and metadata are restored, and the stored data does not depend on Python class names.
    """

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: DomainError | None, dialect: Dialect) -> bytes | None:
        return None if value is None else status_from_error(value).SerializeToString(deterministic=True)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> DomainError | None:
        return None if value is None else error_from_status(status_pb2.Status.FromString(value))


class Base(DeclarativeBase):
    """Base of all tables; maps the types of values to columns."""

    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's declaration)
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        Mapping[str, str]: JSON,
        int: BigInteger,
    }


def select_values(row_class: type[Base], value_class: type[Any]) -> Select[Any]:
    """Return a query for the columns that are fields of `value_class`."""
    return cast(Select[Any], select(*(getattr(row_class, field.name) for field in fields(value_class))))


def as_row(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copying them."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


async def fetch_one(connection: AsyncConnection, query: Select[Any], value_class: type[Value]) -> Value | None:
    """Return the only row as a value, or None if there is no row."""
    row = (await connection.execute(query)).mappings().one_or_none()
    return None if row is None else value_class(**cast(dict[str, Any], row))


async def fetch_all(connection: AsyncConnection, query: Select[Any], value_class: type[Value]) -> Sequence[Value]:
    """Return the rows of a query as values, in order."""
    rows = (await connection.execute(query)).mappings().all()
    return [value_class(**cast(dict[str, Any], row)) for row in rows]


def insert_into(connection: AsyncConnection, row_class: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """Return an insert with `on_conflict_*` methods, in the connection's dialect."""
    return (postgresql if connection.dialect.name == 'postgresql' else sqlite).insert(row_class)


def lock_key(name: str) -> int:
    """Return the key of PostgreSQL's advisory lock with this name."""
    return int.from_bytes(hashlib.blake2s(name.encode(), digest_size=8).digest(), 'big', signed=True)


class SqlStore:
    """Base class of stores, with helpers that each run in one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _fetch_one(self, query: Select[Any], value_class: type[Value]) -> Value | None:
        async with self._database.read() as connection:
            return await fetch_one(connection, query, value_class)

    async def _fetch_all(self, query: Select[Any], value_class: type[Value]) -> Sequence[Value]:
        async with self._database.read() as connection:
            return await fetch_all(connection, query, value_class)

    async def _fetch_page(
        self, query: Select[Any], value_class: type[Value], page: Page, *, order: Sequence[InstrumentedAttribute[Any]]
    ) -> Listing[Value]:
        """Return a page of the rows of a query; `order` contains the columns of the creation time and the id."""
        if page.after is not None:
            query = query.where(tuple_(*order) < tuple_(page.after.create_time, page.after.item_id))
        query = query.order_by(*(column.desc() for column in order)).limit(page.size + 1)
        found, (time, item_id) = await self._fetch_all(query, value_class), (column.key for column in order)
        return list_page(found, page, cursor_of=lambda item: Cursor(getattr(item, time), getattr(item, item_id)))

    async def _execute(self, statement: Update | Delete) -> int:
        """Run a statement in a transaction and return the number of rows that it changed."""
        async with self._database.write() as connection:
            return (await connection.execute(statement)).rowcount

    async def _add_if_absent(self, row_class: type[Base], value: Value, *, key: Sequence[str]) -> Value:
        """Add a value unless a row has the same values in the unique columns `key`; return the stored value."""
        is_same = and_(*(getattr(row_class, name) == getattr(value, name) for name in key))
        async with self._database.write() as connection:
            insert = insert_into(connection, row_class).values(as_row(value))
            await connection.execute(insert.on_conflict_do_nothing(index_elements=key))
            query = select_values(row_class, type(value)).where(is_same)
            return await fetch_one(connection, query, type(value)) or value

    async def _put(self, row_class: type[Base], row: Mapping[str, Any]) -> None:
        """Add a row, or replace the one with the same primary key."""
        key = [column.name for column in row_class.__table__.primary_key]
        async with self._database.write() as connection:
            insert = insert_into(connection, row_class).values(row)
            await connection.execute(insert.on_conflict_do_update(index_elements=key, set_=row))


async def delete_all(database: Database, row_class: type[Base], condition: ColumnElement[bool]) -> int:
    """Delete the rows that meet a condition, at most `DELETED_AT_ONCE` per transaction, and return their number."""
    keys = [getattr(row_class, column.name) for column in row_class.__table__.primary_key]
    part = tuple_(*keys).in_(select(*keys).where(condition).limit(DELETED_AT_ONCE))
    count, is_last = 0, False
    while not is_last:
        async with database.write() as connection:
            # The condition is checked again, because another gateway may change a row in the meantime.
            deleted = (await connection.execute(delete(row_class).where(condition, part))).rowcount
        count, is_last = count + deleted, deleted < DELETED_AT_ONCE
    return count


def has_label(labels: InstrumentedAttribute[Any], label: tuple[str, str], dialect: str) -> ColumnElement[bool]:
    """Return the condition that `labels` contains the name and value in `label`. The name may have any characters."""
    expand = func.json_each_text if dialect == 'postgresql' else func.json_each
    entry = expand(labels).table_valued('key', 'value')
    return select(entry.c.key).where(entry.c.key == label[0], entry.c.value == label[1]).exists()
