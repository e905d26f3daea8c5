"""Domain errors in a column: as the bytes of their `google.rpc.Status`, the form that every service speaks.

So code, reason, message, facts and fields outlive the process, and no class of ours is named in the database.
"""

from google.rpc import status_pb2
from sqlalchemy import Dialect, LargeBinary
from sqlalchemy.types import TypeDecorator

from services.kit.errors import DomainError
from services.kit.rpc.status import error_from_status, status_from_error


class ErrorStatus(TypeDecorator[DomainError]):
    """An error, or none."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: DomainError | None, dialect: Dialect) -> bytes | None:
        """Return the bytes of its status."""
        del dialect
        return None if value is None else status_from_error(value).SerializeToString(deterministic=True)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> DomainError | None:
        """Return the error."""
        del dialect
        return None if value is None else error_from_status(status_pb2.Status.FromString(value))
