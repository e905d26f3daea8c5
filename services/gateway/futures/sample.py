"""The executor of sampling: it completes one prompt, on whatever sampler there is.

Nothing is kept of a request that was cut off: sampled again it is another draw of the same distribution, and with
a seed the same one, and nobody saw the first.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from services.gateway.fleet.routing import AdapterRequest
from services.gateway.futures.persistence import Persistence
from services.gateway.futures.rules import Future
from services.gateway.sampling.handles import SamplingHandles
from services.gateway.sampling.rules import BatchRequest, PromptResult
from services.kit.caller import Caller
from services.kit.errors import DomainError, ServiceUnreachable

PATIENCE = timedelta(minutes=30)
_LENGTH_BYTES = 2


@dataclass(frozen=True)
class SampleTask:
    """Payload of a sampling future: one prompt, to be completed."""

    handle_id: str
    """Handle of the weights; empty: the request names them."""
    request: bytes
    """Serialized SampleBatchRequest of one prompt; it names no weights where a handle does."""

    def to_bytes(self) -> bytes:
        """Return the serialized payload: the length of the handle's id, the id and the request."""
        name = self.handle_id.encode()
        return len(name).to_bytes(_LENGTH_BYTES, 'big') + name + self.request

    @classmethod
    def from_bytes(cls, data: bytes) -> 'SampleTask':
        """Return the task that `to_bytes` serialized."""
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], 'big')
        return cls(data[_LENGTH_BYTES:end].decode(), data[end:])


class BatchVerb(Protocol):
    """Completes prompts, as `sample_batch.SampleBatch` does."""

    def __call__(self, caller: Caller, request: BatchRequest) -> AsyncGenerator[PromptResult, None]:
        """Yield an answer for each prompt."""
        ...


class MakeOrder(Protocol):
    """Makes the order that a request is."""

    def __call__(self, request: bytes, /, *, base_model: str, wish: AdapterRequest | None) -> BatchRequest:
        """Return the order for these weights; without a base model, for those that the request names."""
        ...


class SamplePrompt:
    """Implements `ports.Executor`."""

    def __init__(
        self,
        complete: BatchVerb,
        handles: SamplingHandles,
        make_order: MakeOrder,
        persistence: Persistence,
        *,
        acting_for: Callable[[Caller], AbstractContextManager[None]],
        patience: timedelta = PATIENCE,
    ) -> None:
        """Complete prompts by `complete`.

        Args:
            complete: the verb of sampling.
            handles: know the weights.
            make_order: makes its orders.
            persistence: waits between attempts.
            acting_for: makes calls in a block be on behalf of a caller.
            patience: how long to try while there is no sampler, or none that has the weights yet.
        """
        self._complete = complete
        self._handles = handles
        self._make_order = make_order
        self._persistence = persistence
        self._acting_for = acting_for
        self._patience_seconds = patience.total_seconds()
        self.note: Callable[[Future, BatchRequest, PromptResult], None] | None = None
        """Is told what came of a future, before that is settled; nobody is."""

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Return the serialized SampleBatchResponse.

        Raises:
            DomainError: it was refused, or no sampler came in time.
        """
        caller = Caller(tenant_id=future.tenant_id, scopes=frozenset({'sample'}))
        task = SampleTask.from_bytes(payload)
        loop = asyncio.get_running_loop()
        give_up_at, failures = loop.time() + self._patience_seconds, 0
        with self._acting_for(caller):
            while True:
                try:
                    return await self._answer(caller, future, task)
                except DomainError as error:
                    if not error.disposition.is_transient or loop.time() >= give_up_at:
                        raise
                await self._persistence.hold(failures)
                failures += 1

    async def stop(self, future: Future) -> bool:
        """Say that it may be cut off: that ends the sampler's call at once."""
        del future
        return True

    async def _answer(self, caller: Caller, future: Future, task: SampleTask) -> bytes:
        base_model, wish = '', None
        if task.handle_id:
            handle = await self._handles.resolved(task.handle_id)
            base_model, wish = handle.base_model, handle.wish
        order = self._make_order(task.request, base_model=base_model, wish=wish)
        async with aclosing(self._complete(caller, order)) as answers:
            async for answer in answers:
                if self.note is not None:
                    self.note(future, order, answer)
                return answer.message
        raise ServiceUnreachable('sampler')
