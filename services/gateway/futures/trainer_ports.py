"""Calls of the model service."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class ParkedAdapter:
    """An adapter that was to leave the memory."""

    is_at_rest: bool
    """False: an operation of it runs, so that it is to be parked again later."""
    checkpoint_path: str
    """Where its weights are saved; empty: nowhere."""


class AdapterKeeper(Protocol):
    """Parks adapters on behalf of a tenant.

    Every verb raises the service's own error as a DomainError, or ServiceUnreachable.
    """

    async def of_session(self, tenant_id: str, session_id: str) -> Sequence[str]:
        """Return the adapters that were made in a session, at every model service."""
        ...

    async def park(self, tenant_id: str, adapter_id: str, *, save_prefix: str) -> ParkedAdapter | None:
        """Have an adapter parked, its unsaved steps saved first where there is a prefix for the checkpoint's name.

        Again is harmless.

        Returns:
            The adapter; None where it is not there any more.
        """
        ...


class Trainer(Protocol):
    """Calls the model service on behalf of a tenant; requests and answers are the contract's, serialized.

    Every verb raises the service's own error as a DomainError, or ServiceUnreachable.
    """

    async def create_adapter(self, tenant_id: str, request: bytes, *, request_id: str) -> bytes:
        """Create an adapter, once for each request id, and return the answer."""
        ...

    async def delete_adapter(self, tenant_id: str, request: bytes) -> bytes:
        """Delete an adapter, and return the answer."""
        ...

    async def last_number(self, tenant_id: str, adapter_id: str) -> int:
        """Return the number of an adapter's last operation; 0 before the first."""
        ...

    async def execute(self, tenant_id: str, request: bytes, *, number: int) -> bytes:
        """Run an operation under that number, and return the answer: of the record where it ran before."""
        ...

    async def cancel(self, tenant_id: str, adapter_id: str, *, number: int) -> None:
        """Drop an operation that still waits there; one that runs or is done stays as it is."""
        ...
