"""Ports of futures: their stores, their executors, and the model service."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from twinkle_services.gateway.futures.rules import Future


class FutureStore(Protocol):
    """Stores futures. Every method raises ServiceUnreachable if the store does not respond."""

    async def add_if_absent(self, future: Future) -> Future:
        """Store the future unless a future with that id is stored; return the stored one.

        A new future is returned as the same object. If another gateway owns the lane, a copy with that owner is stored
        and returned instead.

        Raises:
            ServiceUnreachable: the gateway that the future names as its owner lost its lease.
        """
        ...

    async def get(self, tenant_id: str, future_id: str) -> Future | None:
        """Return the tenant's future, or None."""
        ...

    async def number(self, future: Future, number: int, *, instead_of: int | None) -> int:
        """Store the number of a future if its stored number is `instead_of`; return the number that is then stored.

        Raises:
            FutureTaken: another gateway owns the future.
        """
        ...

    async def settle(self, future: Future) -> Future:
        """Store a finished future, unless the stored one is finished or has another owner; return the stored one."""
        ...

    async def list_waiting(self, owner: str = '') -> Sequence[Future]:
        """Return an owner's unfinished futures, by lane and position; without a lane, in the order of arrival."""
        ...

    async def list_of_session(self, tenant_id: str, session_id: str) -> Sequence[Future]:
        """Return the unfinished futures of a session, in any order."""
        ...

    async def next_position(self, tenant_id: str, lane: str) -> int:
        """Return the position after the last finished future of a lane; 0 without one."""
        ...

    async def list_finished(self, *, finished_before: datetime, limit: int) -> Sequence[Future]:
        """Return up to `limit` futures that finished before a time and are not expired."""
        ...

    async def list_by_topic(
        self, tenant_id: str, topic: str, *, since: datetime | None, limit: int
    ) -> Sequence[Future]:
        """Return a topic's unexpired futures that finished at `since` or later, in the order of their finish times."""
        ...

    async def expire(self, future_ids: Collection[str]) -> None:
        """Mark finished futures as expired."""
        ...

    async def drop_expired(self, *, finished_before: datetime) -> int:
        """Delete expired futures that finished before a time; keep the last of each lane. Return the number deleted."""
        ...

    async def find_known(self, future_ids: Collection[str]) -> Collection[str]:
        """Return the ids whose futures are stored and not expired."""
        ...


class PayloadStore(Protocol):
    """Stores requests and results outside the database, by name. Stored data survives a crash of the process.

    Every method raises ServiceUnreachable if the disk fails.
    """

    async def check_free_space(self, size_bytes: int) -> None:
        """Check that there is enough space for a new request. Some space stays reserved for results and counters.

        Raises:
            DiskFull: there is too little space.
        """
        ...

    async def put(self, name: str, data: bytes) -> None:
        """Store `data`, replacing data of the same name."""
        ...

    async def get(self, name: str) -> bytes | None:
        """Return the stored data, or None."""
        ...

    async def size(self, name: str) -> int:
        """Return the number of bytes that `get` would return; 0 if it would return None."""
        ...

    async def delete(self, name: str) -> None:
        """Delete the data; an absent name is ignored."""
        ...

    async def list_old(self, *, stored_before: datetime) -> Sequence[str]:
        """Return the names of data that was stored before a time."""
        ...


class Executor(Protocol):
    """Runs one kind of future. A future may be run again after a crash; its request must not take effect twice."""

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Run a future on behalf of its tenant and return the result.

        Raises:
            DomainError: the future failed permanently. Executors retry after transient failures, such as a restart.
            FutureTaken: another gateway owns the future.
        """
        ...

    async def stop(self, future: Future) -> bool:
        """Return True if the caller may cancel the call. Otherwise stop the work if possible, and return False."""
        ...


class Trainer(Protocol):
    """Calls the model service on behalf of a tenant, with serialized requests and responses of the contract.

    Every method raises the service's error as a DomainError, or ServiceUnreachable.
    """

    async def create_adapter(self, tenant_id: str, request: bytes, *, request_id: str) -> bytes:
        """Create an adapter, once for each request id, and return the response."""
        ...

    async def delete_adapter(self, tenant_id: str, request: bytes) -> bytes:
        """Delete an adapter, and return the response."""
        ...

    async def last_number(self, tenant_id: str, adapter_id: str) -> int:
        """Return the number of an adapter's last operation; 0 before the first."""
        ...

    async def execute(self, tenant_id: str, request: bytes, *, number: int) -> bytes:
        """Run an operation under a number and return the response; a repeated number returns the recorded response."""
        ...

    async def cancel(self, tenant_id: str, adapter_id: str, *, number: int) -> None:
        """Cancel an operation that is queued, or that is running and needs more passes."""
        ...
