"""Base class of all tables, and the column types that they share.

Each feature defines its own tables. Columns have the names of the fields of the feature's values, so that rows and
values convert by name. Only the migrations create the schema; a contract test compares the two.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from google.rpc import status_pb2
from sqlalchemy import JSON, BigInteger, DateTime, Dialect, LargeBinary, String
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

from services.kit.errors import DomainError
from services.kit.rpc.status import error_from_status, status_from_error

Member = TypeVar('Member', bound=StrEnum)


class UtcDateTime(TypeDecorator[datetime]):
    """Moment in UTC; a value read from SQLite, which drops time zones, gets its zone back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class EnumName(TypeDecorator[Member]):
    """Member of a string enum, stored as its value of at most 16 characters."""

    impl = String(16)
    cache_ok = True

    def __init__(self, enum_class: type[Member]) -> None:
        super().__init__()
        # SQLAlchemy builds its cache key from public attributes with the names of the parameters.
        self.enum_class = enum_class

    def process_bind_param(self, value: Member | None, dialect: Dialect) -> str | None:
        del dialect
        return None if value is None else value.value

    def process_result_value(self, value: str | None, dialect: Dialect) -> Member | None:
        del dialect
        return None if value is None else self.enum_class(value)


class TextTuple(TypeDecorator[tuple[str, ...]]):
    """Tuple of texts, stored as a JSON list."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> list[str] | None:
        del dialect
        return None if value is None else list(value)

    def process_result_value(self, value: list[str] | None, dialect: Dialect) -> tuple[str, ...] | None:
        del dialect
        return None if value is None else tuple(value)


class ErrorStatus(TypeDecorator[DomainError]):
    """Domain error, stored as a serialized `google.rpc.Status`.

    Code, reason, message and metadata survive the process, and the database names no Python class.
    """

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: DomainError | None, dialect: Dialect) -> bytes | None:
        del dialect
        return None if value is None else status_from_error(value).SerializeToString(deterministic=True)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> DomainError | None:
        del dialect
        return None if value is None else error_from_status(status_pb2.Status.FromString(value))


class Base(DeclarativeBase):
    """Base of all tables; maps the types of values to columns."""

    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's declaration)
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        Mapping[str, str]: JSON,
        int: BigInteger,
    }
