"""The store of sampling handles."""

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
