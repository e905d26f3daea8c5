"""Calls of samplers."""

from collections.abc import AsyncGenerator
from typing import Protocol

from services.gateway.fleet.rules import ReplicaLoad, ResidentAdapter
from services.gateway.sampling.rules import BatchOrder, Piece, Progress, PromptAnswer, SampleOrder, Share


class Samplers(Protocol):
    """Calls samplers on behalf of the current caller.

    Every verb raises the sampler's own error as a DomainError, or ServiceUnreachable where the connection
    was refused or lost. Closing a generator ends its call at once.

    Args (of all verbs):
        address: 'host:port' of a replica.
        deadline: on the event loop's clock; None: none.
    """

    def sample(
        self, address: str, order: SampleOrder, *, progress: Progress, deadline: float | None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the answer, or what is missing of it after `progress`."""
        ...

    def complete(self, address: str, share: Share, *, deadline: float | None) -> AsyncGenerator[PromptAnswer, None]:
        """Yield the answers of a share of a SampleBatch, as they are finished."""
        ...

    async def score(self, address: str, share: Share, *, deadline: float | None) -> bytes:
        """Return the answer of a share of a ComputeLogprobs."""
        ...

    async def resolve(self, address: str, order: BatchOrder, *, deadline: float | None) -> int:
        """Return the version that a batch means at this replica, which holds it from then on."""
        ...

    async def call(self, address: str, method: str, request: bytes, *, deadline: float | None) -> bytes:
        """Return the answer of a method that has one, such as 'Pause'."""
        ...

    async def abort(self, address: str, request_id: str) -> bool:
        """End a request and return whether it was running there; one that cannot be reached is no error."""
        ...

    async def resident_adapters(self, address: str, *, deadline: float | None) -> list[ResidentAdapter]:
        """Return the caller's versions there, all pages."""
        ...

    async def load(self, address: str, *, deadline: float | None) -> ReplicaLoad:
        """Return how busy a replica is."""
        ...

    def aborted(self, progress: Progress) -> list[Piece]:
        """Return the ends of sequences that were aborted while no replica had them."""
        ...

    def aborted_prompts(self, share: Share) -> list[PromptAnswer]:
        """Return the answers of a share of a SampleBatch that was aborted while no replica had it."""
        ...
