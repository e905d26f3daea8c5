"""The model services behind the gateway: which of them a call belongs to."""

from collections.abc import Collection, Sequence
from typing import Protocol


class ModelFacts(Protocol):
    """Asks model services about themselves and about adapters. A service has the name it is given in the gateway."""

    async def base_models(self, service: str) -> Collection[str] | None:
        """Return what a service holds; None where it does not answer."""
        ...

    async def has_adapter(self, service: str, tenant_id: str, adapter_id: str) -> bool:
        """Say whether a service has a tenant's adapter.

        Raises:
            DomainError: it cannot be asked now.
        """
        ...


class ModelRoutes(Protocol):
    """Knows which model service a call belongs to."""

    @property
    def services(self) -> Sequence[str]:
        """Names of all model services, the first of which gets what no other one could answer better."""
        ...

    def known_base_models(self, service: str) -> Collection[str]:
        """Return what a service holds, as it said last; nothing where it never did."""
        ...

    async def holder_of(self, base_model: str) -> str:
        """Return the service that holds a base model; without a name the first one, which asks for it.

        Raises:
            BaseModelNotFound: none does; it tells what there is.
            ServiceUnreachable: one that was never reached may hold it.
        """
        ...

    async def maker_of(self, tenant_id: str, base_model: str, adapter_id: str) -> str:
        """Return the service that is to make an adapter, of an id that may be empty.

        Raises:
            BaseModelNotFound, ServiceUnreachable: as `holder_of`.
            AdapterIdTaken: the tenant has, or had, an adapter of that id at another service.
        """
        ...

    async def owner_of(self, tenant_id: str, adapter_id: str) -> str | None:
        """Return the service that has a tenant's adapter; None where none has: each refuses it as well as another.

        Raises:
            ServiceUnreachable: one that cannot be reached may have it.
        """
        ...
