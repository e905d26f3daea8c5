"""Fetches an operation's batch from the data service when the operation is the next one of its adapter.

The fetched batch becomes part of the operation's payload in the journal. A replay therefore needs no data service, and
a repeated operation returns the recorded result without fetching.
"""

import asyncio
from contextlib import AsyncExitStack
from weakref import WeakValueDictionary

from twinkle_services.kit.byte_gate import ByteGate, Hold
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.telemetry import spans
from twinkle_services.model.domain.loader_batch import BatchReference, BatchSource, LoadedBatch
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.ports import RecordCodec

_THREAD_BYTES = 32 << 10
"""Size in bytes from which batches are converted in a thread. On the event loop, the conversion would block other tasks
for milliseconds."""
_FULL_QUOTA_COUNT = 4
"""Number of tenants whose full quotas fit within the total limit; more tenants share the total limit."""


class FetchBatch:
    """Fetches batches within a memory limit.

    Batches of one tenant are fetched one after the other. The size of a batch is known only after it has been fetched,
    so the batch then waits until it fits within the limit together with the batches in use.

    Concurrency: use it from one event loop only.
    """

    def __init__(self, batches: BatchSource, codec: RecordCodec, *, tenant_bytes: int) -> None:
        """Create the fetcher.

        Args:
            batches: Source of the batches.
            codec: Inserts batches into operations.
            tenant_bytes: Maximum bytes of one tenant's batches in memory; a single larger batch is allowed.
        """
        self._batches = batches
        self._codec = codec
        self._gate = ByteGate(
            tenant_bytes=tenant_bytes, total_bytes=_FULL_QUOTA_COUNT * tenant_bytes, wait_seconds=None
        )
        self._tenant_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __call__(self, stack: AsyncExitStack, caller: Caller, operation: Operation) -> Operation:
        """Return the operation with its batch, whose bytes are reserved until `stack` closes.

        Raises:
            DomainError: `BatchSource.load` or `RecordCodec.with_batch` raised it.
        """
        if operation.batch_reference is None or not operation.is_batch_missing:
            return operation
        hold = self._gate.hold(caller.tenant_id)
        stack.callback(hold.release)
        loaded = await self._in_turn(caller.tenant_id, hold, operation.batch_reference)
        reach('batch.fetched')
        if len(loaded.content) < _THREAD_BYTES:
            return self._codec.with_batch(operation, loaded)
        return await asyncio.to_thread(self._codec.with_batch, operation, loaded)

    async def _in_turn(self, tenant_id: str, hold: Hold, batch_reference: BatchReference) -> LoadedBatch:
        async with self._tenant_locks.setdefault(tenant_id, asyncio.Lock()):
            with spans.span('fetch batch') as span:
                loaded = await self._batches.load(batch_reference)
                spans.annotate(span, size_bytes=len(loaded.content))
            await hold.grow(len(loaded.content))
        return loaded
