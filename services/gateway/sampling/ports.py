"""Ports of sampling: calls to samplers, the store of handles, and facts about weights that other services own."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from services.gateway.fleet.rules import ReplicaLoad, ResidentAdapter
from services.gateway.sampling.rules import (
    BatchPart,
    BatchRequest,
    Progress,
    PromptResult,
    SampleChunk,
    SampleRequest,
    SamplingHandle,
)


class SamplerClient(Protocol):
    """Calls samplers on behalf of the current caller.

    Every method raises the sampler's error as a DomainError, or ServiceUnreachable where the connection was refused
    or lost. Closing a generator cancels its call.

    Args (of all methods):
        address: 'host:port' of a replica.
        deadline: Time on the event loop's clock; None for no deadline.
    """

    def sample(
        self, address: str, request: SampleRequest, *, progress: Progress, deadline: float | None
    ) -> AsyncGenerator[SampleChunk, None]:
        """Yield the response, or the rest of it after `progress`."""
        ...

    def complete(self, address: str, part: BatchPart, *, deadline: float | None) -> AsyncGenerator[PromptResult, None]:
        """Yield the results of a part of a SampleBatch, as they finish."""
        ...

    async def score(self, address: str, part: BatchPart, *, deadline: float | None) -> bytes:
        """Return the ComputeLogprobsResponse for a part of a batch."""
        ...

    async def resolve(self, address: str, request: BatchRequest, *, deadline: float | None) -> int:
        """Load the adapter of a batch at the replica and return the version that the request means there."""
        ...

    async def call(self, address: str, method: str, message: bytes, *, deadline: float | None) -> bytes:
        """Call a unary method, such as 'Pause', and return its response."""
        ...

    async def abort(self, address: str, request_id: str) -> bool:
        """Abort a request and return whether it was running there; False for an unreachable replica."""
        ...

    async def resident_adapters(self, address: str, *, deadline: float | None) -> list[ResidentAdapter]:
        """Return all adapter versions of the caller at the replica."""
        ...

    async def load(self, address: str, *, deadline: float | None) -> ReplicaLoad:
        """Return the load of a replica."""
        ...

    def aborted(self, progress: Progress) -> list[SampleChunk]:
        """Return the final chunks of the open sequences of a request that was aborted between replicas."""
        ...

    def aborted_prompts(self, part: BatchPart) -> list[PromptResult]:
        """Return the results of a part of a SampleBatch that was aborted before a replica had it."""
        ...


class HandleStore(Protocol):
    """Stores sampling handles. Their ids are unique within a tenant."""

    async def add_if_absent(self, handle: SamplingHandle) -> SamplingHandle:
        """Store the handle unless the tenant has one of that id; return the stored one."""
        ...

    async def get(self, tenant_id: str, handle_id: str) -> SamplingHandle | None:
        """Return the tenant's handle, or None."""
        ...

    async def settle(self, tenant_id: str, handle_id: str, *, base_model: str, version: int | None) -> None:
        """Fill in the base model and the version where they are unknown; '' and None change nothing.

        An absent handle is no error.
        """
        ...

    async def count_clone(self, tenant_id: str, handle_id: str) -> int | None:
        """Add one to the copies of a handle's client and return their number; None if there is no handle."""
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
        """Unpin a version, so that the checkpoint service may drop it when newer ones arrive."""
        ...
