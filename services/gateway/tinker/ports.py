"""What the Tinker API needs beside the gateway's own ports. Messages of the native contracts travel as bytes."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from services.gateway.sessions.rules import Session

FindSession = Callable[[str], Awaitable[Session]]
"""Returns the caller's session by its id, or raises SessionNotFound."""


class Lookups(Protocol):
    """Looks things up at other services, on behalf of the current caller.

    Every verb raises the service's own error as a DomainError, or ServiceUnreachable.
    """

    async def adapter(self, adapter_id: str) -> bytes:
        """Return an adapter, as model.v1.Adapter."""
        ...

    async def checkpoint(self, checkpoint_path: str) -> bytes:
        """Return a checkpoint by our own path, as checkpoint.v1.Checkpoint."""
        ...


class SamplerSaves(Protocol):
    """Sampling sessions of weights that are being published, without a name."""

    async def attach(
        self, *, handle_id: str, session_id: str, model_id: str, future_id: str, is_inflight: bool
    ) -> None:
        """Make the sampling session whose weights a future publishes; the same again is no error.

        Raises:
            DomainError: the id is taken by another one.
        """
        ...
