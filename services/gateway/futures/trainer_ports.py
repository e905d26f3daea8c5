"""Calls of the model service."""

from typing import Protocol


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
