"""The samplers behind the gateway: how they stand, and the connections to them."""

from collections.abc import AsyncGenerator, Collection
from typing import Protocol

from services.gateway.fleet.rules import ReplicaReport


class SamplerFacts(Protocol):
    """How a sampler stands that holds no lease."""

    def follow(self) -> AsyncGenerator[ReplicaReport, None]:
        """Yield what it says of itself, at once and about every second.

        Raises:
            DomainError: it cannot be reached any more.
        """
        ...


class Connections(Protocol):
    """Connections to replicas, by address."""

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Close all others."""
        ...
