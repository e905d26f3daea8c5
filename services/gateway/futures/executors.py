"""Executors of futures: for operations, the creation and deletion of adapters, sampling, and refused requests."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from twinkle_services.gateway.futures.ports import Executor, FutureStore, Trainer
from twinkle_services.gateway.futures.rules import CREATE_KIND, DELETE_KIND, EXECUTE_KIND, Future, FutureState
from twinkle_services.gateway.quotas.rules import Work
from twinkle_services.gateway.quotas.usage_meter import UsageMeter
from twinkle_services.gateway.sampling.convert import batch_request_for_weights
from twinkle_services.gateway.sampling.handles import SamplingHandles
from twinkle_services.gateway.sampling.rules import BatchRequest, PromptResult
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import Cancelled, DomainError, InvalidField, ServiceUnreachable
from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.retry import Retry
from twinkle_services.kit.rpc.context import acting_for

SAMPLE_PATIENCE = timedelta(minutes=30)
_MAX_REMEMBERED = 1024
_NOT_RUN = {'SEQUENCE_REUSED', 'SEQUENCE_GAP'}
_SENT = 1
"""Number that is stored for a deletion before it is sent."""
_LENGTH_BYTES = 2
_MAX_UNSETTLED = 1 << 16
"""Maximum number of sampling futures whose usage is remembered; more than usually run at the same time."""


class ExecuteOperation:
    """Runs a training operation exactly once. The lane of its future is the adapter.

    An operation gets the next number of its adapter, and the number is stored before the operation is sent. After a
    transient failure or a restart, the operation is sent again under that number. If it ran before, the model service
    returns the recorded response. An operation gets a new number only if the service reports that the operation did
    *not* run under its number: another caller's operation has the number (SEQUENCE_REUSED), or earlier operations are
    lost (SEQUENCE_GAP). A refused operation leaves its number unused, and the lane's next operation takes that number.
    """

    def __init__(self, trainer: Trainer, store: FutureStore, retry: Retry) -> None:
        self._trainer = trainer
        self._store = store
        self._retry = retry
        self._sent: dict[str, int] = {}
        """Numbers of the operations that are being sent or run, by the id of the future."""
        self._unnumbered: set[str] = set()
        """Ids of futures that need a sequence number: they have none, or did not run under the one they had."""
        self._stopped: set[str] = set()
        """Ids of unnumbered futures that were cancelled."""
        self._last: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        """Position and number of the last success of each adapter, so that the next number needs no query."""

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Return the serialized ExecuteResponse.

        Raises:
            DomainError: the operation failed or was refused.
        """
        number, failures = future.number, 0
        last = self._last_before(future)
        if number is None:
            number = await self._renumber(future, last=last, instead_of=None)
        while (response := await self._send(future, payload, number)) is None:
            # Another caller's operation may still run under the number; `last_number` counts it only once it is done.
            number = await self._renumber(future, last=None, instead_of=number, failures=failures)
            failures += 1
        reach('future.executed')
        self._last[future.tenant_id, future.lane] = future.position, number
        if len(self._last) > _MAX_REMEMBERED:
            self._last.popitem(last=False)
        return response

    async def stop(self, future: Future) -> bool:
        """Cancel the operation if it is queued or needs more passes; `__call__` then fails. Return False."""
        number = self._sent.get(future.future_id)
        if future.future_id in self._unnumbered:
            self._stopped.add(future.future_id)
        elif number is not None:
            await self._trainer.cancel(future.tenant_id, future.lane, number=number)
        return False

    async def _send(self, future: Future, payload: bytes, number: int) -> bytes | None:
        """Return the response; None if the operation did not run under this number."""
        self._sent[future.future_id] = number
        try:
            return await self._retry.call(partial(self._trainer.execute, future.tenant_id, payload, number=number))
        except DomainError as error:
            if error.reason in _NOT_RUN:
                return None
            raise
        finally:
            self._sent.pop(future.future_id, None)

    def _last_before(self, future: Future) -> int | None:
        """Return the number of the previous position, or None if it is not known, for example after a failure."""
        position, number = self._last.pop((future.tenant_id, future.lane), (None, None))
        return number if position is not None and position + 1 == future.position else None

    async def _renumber(
        self, future: Future, *, last: int | None, instead_of: int | None, failures: int | None = None
    ) -> int:
        """Assign a number to a future that did not run; if an earlier number failed, pause first.

        Raises:
            Cancelled: the future was stopped before it had a number.
        """
        self._unnumbered.add(future.future_id)
        try:
            if failures is not None:
                await self._retry.back_off(failures)
            number = await self._take_number(future, last=last, instead_of=instead_of)
            if future.future_id in self._stopped:
                raise Cancelled()
            return number
        finally:
            self._unnumbered.discard(future.future_id)
            self._stopped.discard(future.future_id)

    async def _take_number(self, future: Future, *, last: int | None, instead_of: int | None) -> int:
        if last is None:
            last = await self._retry.call(partial(self._trainer.last_number, future.tenant_id, future.lane))
        reach('future.numbering')
        number = await self._retry.call(partial(self._store.number, future, last + 1, instead_of=instead_of))
        reach('future.numbered')
        return number


class CreateAdapter:
    """Creates an adapter exactly once. The future's id is the request id, unless the request already has one."""

    def __init__(self, trainer: Trainer, retry: Retry) -> None:
        self._trainer = trainer
        self._retry = retry

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        create = partial(self._trainer.create_adapter, future.tenant_id, payload, request_id=future.future_id)
        return await self._retry.call(create)

    async def stop(self, future: Future) -> bool:
        """Return False: a creation is not interrupted."""
        del future
        return False


class DeleteAdapter:
    """Deletes an adapter. A repeated attempt that finds no adapter succeeds: an earlier attempt may have deleted it."""

    def __init__(self, trainer: Trainer, store: FutureStore, retry: Retry) -> None:
        self._trainer = trainer
        self._store = store
        self._retry = retry

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        attempts = 0 if future.number is None else 1
        if future.number is None:
            await self._retry.call(partial(self._store.number, future, _SENT, instead_of=None))

        async def delete() -> bytes:
            nonlocal attempts
            attempts += 1
            return await self._trainer.delete_adapter(future.tenant_id, payload)

        try:
            return await self._retry.call(delete)
        except DomainError as error:
            if attempts > 1 and error.reason == 'ADAPTER_NOT_FOUND':
                return b''
            raise

    async def stop(self, future: Future) -> bool:
        del future
        return False


class FailRefused:
    """Fails a request that was refused before it was submitted.

    A refused request has a position in its lane; without a future at that position, later requests would wait for it.
    """

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Raise the InvalidField that the payload describes."""
        del future
        raise InvalidField(**json.loads(payload))

    async def stop(self, future: Future) -> bool:
        del future
        return True


def training_executors(trainer: Trainer, store: FutureStore, retry: Retry) -> dict[str, Executor]:
    """Return the executors of operations, and of the creation and deletion of adapters, by kind."""
    return {
        CREATE_KIND: CreateAdapter(trainer, retry),
        DELETE_KIND: DeleteAdapter(trainer, store, retry),
        EXECUTE_KIND: ExecuteOperation(trainer, store, retry),
    }


def refusal_payload(field: str, problem: str) -> bytes:
    """Return the payload of a future that `FailRefused` fails."""
    return json.dumps({'field': field, 'problem': problem}).encode()


@dataclass(frozen=True)
class SampleTask:
    """Payload of a sampling future: one prompt to complete."""

    handle_id: str
    """Handle of the weights; empty if the request names them."""
    request: bytes
    """Serialized SampleBatchRequest of one prompt; without weights if there is a handle."""

    def to_bytes(self) -> bytes:
        """Return the payload: the length of the handle's id as two big-endian bytes, the id, and the request."""
        name = self.handle_id.encode()
        return len(name).to_bytes(_LENGTH_BYTES, 'big') + name + self.request

    @classmethod
    def from_bytes(cls, data: bytes) -> 'SampleTask':
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], 'big')
        return cls(data[_LENGTH_BYTES:end].decode(), data[end:])


class SamplePrompt:
    """Completes one prompt on any sampler.

    An interrupted attempt has no effect: its tokens reached no client. The next attempt samples from the same
    distribution; with a seed, an engine of the same kind returns the same tokens. Transient failures are retried for
    `patience`. `on_result` is called with each result before its future is settled.
    """

    def __init__(
        self,
        complete: Callable[[Caller, BatchRequest], AsyncGenerator[PromptResult, None]],
        handles: SamplingHandles,
        retry: Retry,
        *,
        on_result: Callable[[Future, BatchRequest, PromptResult], None] | None = None,
        patience: timedelta = SAMPLE_PATIENCE,
    ) -> None:
        self._complete = complete
        self._handles = handles
        self._retry = retry
        self._on_result = on_result
        self._patience_seconds = patience.total_seconds()

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Return the serialized SampleBatchResponse.

        Raises:
            DomainError: the request was refused, or no sampler was available in time.
        """
        caller = Caller(tenant_id=future.tenant_id, scopes=frozenset({'sample'}))
        task = SampleTask.from_bytes(payload)
        loop = asyncio.get_running_loop()
        give_up_at, failures = loop.time() + self._patience_seconds, 0
        with acting_for(caller):
            while True:
                try:
                    return await self._attempt(caller, future, task)
                except DomainError as error:
                    if not error.disposition.is_transient or loop.time() >= give_up_at:
                        raise
                await self._retry.back_off(failures)
                failures += 1

    async def stop(self, future: Future) -> bool:
        """Return True: cancelling the call cancels the sampler's call immediately."""
        del future
        return True

    async def _attempt(self, caller: Caller, future: Future, task: SampleTask) -> bytes:
        base_model, adapter = '', None
        if task.handle_id:
            handle = await self._handles.resolved(task.handle_id)
            base_model, adapter = handle.base_model, handle.adapter
        request = batch_request_for_weights(task.request, base_model=base_model, adapter=adapter)
        async with aclosing(self._complete(caller, request)) as results:
            async for result in results:
                if self._on_result is not None:
                    self._on_result(future, request, result)
                return result.message
        raise ServiceUnreachable('sampler')


class SampleTally:
    """Counts the usage of the sampling futures that run here. Each future counts once, when it is settled."""

    def __init__(self, meter: UsageMeter) -> None:
        self._meter = meter
        self._works: OrderedDict[str, tuple[str, Work]] = OrderedDict()
        """Run and usage, by the id of the future."""

    def note(self, future: Future, request: BatchRequest, result: PromptResult) -> None:
        """Record the usage of a future's last attempt; earlier attempts do not count."""
        self._works[future.future_id] = request.keys[0].run_id, result.work
        if len(self._works) > _MAX_UNSETTLED:
            self._works.popitem(last=False)

    def settled(self, future: Future, stored: Future) -> None:
        """Count the usage of a settled future, if the stored future is done and belongs to this gateway."""
        work = self._works.pop(future.future_id, None)
        # The finish times are not compared: they differ if an earlier attempt succeeded and its response was lost.
        if work is not None and stored.state is FutureState.DONE and stored.owner == future.owner:
            self._meter.count(future.tenant_id, *work)
