"""Fetch the batch of an operation from the data service, when it is the operation's turn.

What was fetched becomes part of the operation's payload, so the journal keeps it: a replay asks nobody, and a
repeat of the operation is answered from the record before anything is fetched.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from weakref import WeakValueDictionary

from services.kit.authority import require_scope
from services.kit.byte_gate import ByteGate, Hold
from services.kit.caller import Caller
from services.kit.errors import Cancelled, DomainError, Draining
from services.kit.failpoints import reach
from services.model.domain.loader_batch import BatchReference, BatchSource, LoadedBatch
from services.model.domain.operation import Operation
from services.model.ports import RecordCodec

_THREAD_BYTES = 1 << 20
"""Larger batches are converted beside the event loop, which they would hold up for milliseconds."""
_TENANTS_IN_FULL = 4
"""Tenants that may hold as much as one may at the same time; more share."""


def require_loader_scope(caller: Caller, operation: Operation) -> None:
    """Refuse whoever names a loader and may not read data.

    Raises:
        ScopeMissing: the key is not enough.
    """
    if operation.batch_reference is not None:
        require_scope(caller, 'data')


class FetchBatch:
    """Fetches batches. For one event loop.

    A tenant's batches are fetched one after the other, and each waits until there is room for it beside those that
    are being computed on: how large one is, is known only once it is here.
    """

    def __init__(
        self, batches: BatchSource, codec: RecordCodec, *, tenant_bytes: int, is_alone: Callable[[str], bool]
    ) -> None:
        """Begin with nothing under way.

        Args:
            batches: gives them.
            codec: puts them into their operations.
            tenant_bytes: most of one tenant's batches that are held, one that is larger by itself left apart.
            is_alone: whether an adapter has the replica for itself. Its batches wait for nobody: those that hold room
                may be waiting for its end.
        """
        self._batches = batches
        self._codec = codec
        self._is_alone = is_alone
        self._gate = ByteGate(tenant_bytes=tenant_bytes, total_bytes=_TENANTS_IN_FULL * tenant_bytes, wait_seconds=None)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._fetching: dict[str, asyncio.Future[LoadedBatch]] = {}
        """By adapter: what ends a fetch, or the wait for its turn, early."""
        self._is_closed = False

    async def __call__(self, stack: AsyncExitStack, caller: Caller, operation: Operation) -> Operation:
        """Return the operation with its batch, whose bytes count until the stack ends.

        Raises:
            DomainError: as `BatchSource.load` and `RecordCodec.with_batch` say, or what it was cancelled with.
        """
        if operation.batch_reference is None or not operation.is_batch_missing:
            return operation
        if self._is_closed:
            raise Draining()
        if self._is_alone(operation.adapter_id):
            fetch = self._batches.load(operation.batch_reference)
        else:
            hold = self._gate.hold(caller.tenant_id)
            stack.callback(hold.release)
            fetch = self._in_turn(caller.tenant_id, hold, operation.batch_reference)
        loaded = await self._unless_cancelled(operation.adapter_id, fetch)
        reach('batch.fetched')
        if len(loaded.content) < _THREAD_BYTES:
            return self._codec.with_batch(operation, loaded)
        return await asyncio.to_thread(self._codec.with_batch, operation, loaded)

    def cancel(self, adapter_id: str, error: DomainError | None = None) -> bool:
        """End the adapter's operation as cancelled, or as `error`, if its batch is not here yet; False otherwise."""
        ended = self._fetching.get(adapter_id)
        if ended is None or ended.done():
            return False
        ended.set_exception(error or Cancelled())
        return True

    def close(self) -> None:
        """Refuse what is not here yet, and all that comes."""
        self._is_closed = True
        for adapter_id in self._fetching:
            self.cancel(adapter_id, Draining())

    async def _in_turn(self, tenant_id: str, hold: Hold, batch_reference: BatchReference) -> LoadedBatch:
        async with self._turns.setdefault(tenant_id, asyncio.Lock()):
            loaded = await self._batches.load(batch_reference)
            await hold.grow(len(loaded.content))
        return loaded

    async def _unless_cancelled(self, adapter_id: str, fetch: Awaitable[LoadedBatch]) -> LoadedBatch:
        fetching = asyncio.ensure_future(fetch)
        self._fetching[adapter_id] = ended = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([fetching, ended], return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else fetching.result()
        finally:
            del self._fetching[adapter_id]
            fetching.cancel()
            await asyncio.wait([fetching])
            # Where it failed all the same, nobody else asks.
            _ = fetching.cancelled() or fetching.exception()
