"""Futures: what keeps them, what carries them out, and their verbs."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from services.gateway.futures.rules import Future, FutureRequest


class FutureStore(Protocol):
    """Keeps futures."""

    async def add_if_absent(self, future: Future) -> Future:
        """Keep the future, or leave the one of that id as it is; return what is kept.

        It returns the very object that it was given where it is new and has the owner that it names. A new one of a
        lane in which others wait gets their owner.

        Raises:
            ServiceUnreachable: the owner it names has lost its place, or the store does not answer.
        """
        ...

    async def get(self, tenant_id: str, future_id: str) -> Future | None:
        """Return the tenant's future, or None."""
        ...

    async def number(self, future: Future, number: int, *, instead_of: int | None) -> int:
        """Keep what the service behind is to know a future by, where `instead_of` is kept; return what is kept.

        Raises:
            FutureTaken: it has another owner by now.
        """
        ...

    async def settle(self, future: Future) -> Future:
        """Keep a finished future, unless it is finished already or has another owner; return what is kept."""
        ...

    async def list_waiting(self, owner: str = '') -> Sequence[Future]:
        """Return an owner's that are not finished, by lane and position; those of no lane as they came."""
        ...

    async def next_position(self, tenant_id: str, lane: str) -> int:
        """Return the position after the last finished one of a lane; 0 where there is none."""
        ...

    async def list_finished(self, *, finished_before: datetime, limit: int) -> Sequence[Future]:
        """Return some that finished before then and are not expired."""
        ...

    async def list_ended(self, tenant_id: str, topic: str, *, since: datetime | None, limit: int) -> Sequence[Future]:
        """Return a topic's futures that finished at `since` or later, expired ones left out, in that order."""
        ...

    async def expire(self, future_ids: Collection[str]) -> None:
        """Mark finished futures as expired."""
        ...

    async def drop_expired(self, *, finished_before: datetime) -> int:
        """Forget expired futures that finished before then, but the last of each lane; return how many."""
        ...

    async def find_known(self, future_ids: Collection[str]) -> Collection[str]:
        """Return those of the ids whose futures are kept and not expired."""
        ...


class PayloadStore(Protocol):
    """Keeps requests and results outside the database, by name. What was kept survives a kill at any moment.

    Every verb raises ServiceUnreachable where the disk refuses.
    """

    async def put(self, name: str, data: bytes) -> None:
        """Keep `data`; the same name again replaces it."""
        ...

    async def get(self, name: str) -> bytes | None:
        """Return what is kept under the name, or None."""
        ...

    async def size(self, name: str) -> int:
        """Return how many bytes `get` would return; 0 where that is None."""
        ...

    async def delete(self, name: str) -> None:
        """Forget it; one that is not there is no error."""
        ...

    async def list_old(self, *, kept_before: datetime) -> Sequence[str]:
        """Return the names of what was kept before then."""
        ...


class Executor(Protocol):
    """Carries out one kind of future, exactly once however often it is called with the same future."""

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Return the result. It runs as the future's tenant.

        Raises:
            DomainError: it failed for good. What passes, such as a service that restarts, is waited for here.
        """
        ...

    async def stop(self, future: Future) -> bool:
        """Say whether its call may be cut off; where it may not, end what runs if that can be done."""
        ...


class Futures(Protocol):
    """The verbs of futures, as the APIs use them."""

    async def submit(self, order: FutureRequest) -> Future:
        """Accept a request of the current caller, durably; the same key again returns the same future.

        Raises:
            RequestIdReused: the key was used for something else.
            QueueFull: the tenant has too many that wait, or all have.
            ServiceUnreachable: it could not be made durable.
        """
        ...

    async def wait(self, future_id: str, *, seconds: float) -> Future:
        """Return the caller's future when it is finished, or as it is when the time is up.

        Raises:
            FutureNotFound: there is none.
            FutureExpired: there is none any more.
        """
        ...

    async def payload(self, future: Future) -> bytes:
        """Return what was asked, of a future that is not finished.

        Raises:
            FutureExpired: it is finished; what is needed afterwards belongs into its note.
        """
        ...

    async def result(self, future: Future) -> bytes:
        """Return the result of a future that is done.

        Raises:
            DomainError: why it failed.
            FutureExpired: it is no longer kept.
        """
        ...

    async def result_bytes(self, future: Future) -> int:
        """Return how many bytes the result of a future has; 0 where there is none."""
        ...

    async def cancel(self, future_id: str) -> None:
        """Stop a future where that can be done; one that is finished stays as it is.

        One of a lane is passed over when its turn comes.

        Raises:
            FutureNotFound, FutureExpired: as `wait`.
        """
        ...
