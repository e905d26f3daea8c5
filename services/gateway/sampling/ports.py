"""Ports of sampling: the store of handles, and facts about weights that other services own."""

from collections.abc import Sequence
from typing import Protocol

from twinkle_services.gateway.sampling.rules import SamplingHandle


class HandleStore(Protocol):
    """Stores sampling handles. Their ids are unique within a tenant."""

    async def add_if_absent(self, handle: SamplingHandle) -> SamplingHandle:
        """Store the handle unless the tenant has one with that id; return the stored one."""
        ...

    async def get(self, tenant_id: str, handle_id: str) -> SamplingHandle | None:
        """Return the tenant's handle, or None."""
        ...

    async def settle(self, tenant_id: str, handle_id: str, *, base_model: str, version: int | None) -> None:
        """Set the base model and the version if they are unknown; '' and None change nothing.

        An absent handle is ignored.
        """
        ...

    async def count_clone(self, tenant_id: str, handle_id: str) -> int | None:
        """Add one to the number of copies of a handle's client, and return the number; None if there is no handle."""
        ...

    async def list_of_session(self, tenant_id: str, session_id: str) -> Sequence[SamplingHandle]:
        """Return the handles of a session, oldest first."""
        ...


class WeightFacts(Protocol):
    """Facts about weights, on behalf of the current caller.

    Every coroutine raises the owning service's error as a DomainError, or ServiceUnreachable.
    """

    async def base_of_adapter(self, adapter_id: str) -> str:
        """Return an adapter's base model."""
        ...

    async def base_of_checkpoint(self, checkpoint_path: str) -> str:
        """Return the base model of saved weights, given their native path."""
        ...

    def version_of(self, result: bytes) -> int:
        """Return the version that a future published, from its result."""
        ...

    async def unpin(self, adapter_id: str, version: int) -> None:
        """Unpin a version, so that newer versions may replace it."""
        ...
