"""Fetch the batch of an operation from the data service, when it is the operation's turn.

What was fetched becomes part of the operation's payload, so the journal keeps it: a replay asks nobody, and a
repeat of the operation is answered from the record before anything is fetched.
"""

import asyncio
from contextlib import AsyncExitStack
from weakref import WeakValueDictionary

from services.kit.authority import require_scope
from services.kit.byte_gate import ByteGate
from services.kit.caller import Caller
from services.kit.failpoints import reach
from services.model.domain.loader_batch import BatchSource
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
    if operation.place is not None:
        require_scope(caller, 'data')


class FillBatch:
    """Fetches batches. For one event loop.

    A tenant's batches are fetched one after the other, and each waits until there is room for it beside those that
    are being computed on: how large one is, is known only once it is here.
    """

    def __init__(self, batches: BatchSource, codec: RecordCodec, *, tenant_bytes: int) -> None:
        """Hold at most so many bytes of one tenant's batches, one that is larger by itself left apart."""
        self._batches = batches
        self._codec = codec
        self._gate = ByteGate(tenant_bytes=tenant_bytes, total_bytes=_TENANTS_IN_FULL * tenant_bytes, wait_seconds=None)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __call__(self, stack: AsyncExitStack, caller: Caller, operation: Operation) -> Operation:
        """Return the operation with its batch, whose bytes count until the stack ends.

        Raises:
            DomainError: as `BatchSource.load` and `RecordCodec.filled` say.
        """
        if operation.place is None or not operation.is_batch_missing:
            return operation
        hold = self._gate.hold(caller.tenant_id)
        stack.callback(hold.release)
        turn = self._turns.setdefault(caller.tenant_id, asyncio.Lock())
        async with turn:
            loaded = await self._batches.load(operation.place)
            await hold.grow(len(loaded.content))
        reach('batch.fetched')
        if len(loaded.content) < _THREAD_BYTES:
            return self._codec.filled(operation, loaded)
        return await asyncio.to_thread(self._codec.filled, operation, loaded)
