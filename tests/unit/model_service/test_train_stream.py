"""A stream pipelines operations, returns results in order, fails fast after a refusal and applies back-pressure."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import pytest

from fixtures.model_verbs import (
    ALICE,
    FakePorts,
    create_request,
    execute,
    let_others_run,
    numbers_of,
    operation_of,
    training,
)
from twinkle_services.kit.errors import DomainError, InvalidField, QueueFull, ServiceUnreachable
from twinkle_services.model.application.admission import QueueLimits
from twinkle_services.model.application.service import ModelService
from twinkle_services.model.application.train_stream import WINDOW, OperationFailure
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.errors import LossNotFinite, SequenceGap
from twinkle_services.model.domain.operation import LrStep, Operation, PublishVersion, Step, ZeroGrad


class Sender:
    """A stream to which the test sends operations."""

    def __init__(self, verbs: ModelService) -> None:
        self._queue: asyncio.Queue[Operation | OperationFailure | None] = asyncio.Queue()
        self.read_count = 0
        self.results = verbs.train_stream(ALICE, self._operations())

    def send(self, *operations: Operation | OperationFailure | None) -> None:
        """Send operations; None ends the stream."""
        for operation in operations:
            self._queue.put_nowait(operation)

    async def take(self, count: int) -> list[Any]:
        """Return the next results."""
        return [await anext(self.results) for _ in range(count)]

    async def _operations(self) -> AsyncIterator[Operation | OperationFailure]:
        while (operation := await self._queue.get()) is not None:
            self.read_count += 1
            yield operation


async def _adapters(verbs: ModelService, count: int) -> list[Adapter]:
    return [await verbs.create_adapter(ALICE, create_request(f'r{index}')) for index in range(count)]


async def _send_all(verbs: ModelService, operations: Iterable[Operation | OperationFailure]) -> list[Any]:
    """Send the operations in one stream; return the results."""
    sender = Sender(verbs)
    sender.send(*operations, None)
    return [result async for result in sender.results]


def _errors(results: Iterable[Any]) -> dict[int, DomainError]:
    return {result.sequence_number: result.error for result in results if isinstance(result, OperationFailure)}


async def test_a_thousand_operations_of_twenty_adapters_keep_their_order() -> None:
    """A thousand operations of twenty adapters run and return results in the order of each adapter's numbers."""
    ports = FakePorts()
    verbs = ports.verbs()
    adapters = await _adapters(verbs, 20)
    cycle = [training(8), training(3), Step(), ZeroGrad(), LrStep()]
    sent = [operation_of(adapter, number, cycle[number % 5]) for number in range(1, 51) for adapter in adapters]
    results = await _send_all(verbs, sent)
    assert len(results) == 1000
    for adapter in adapters:
        assert numbers_of(results, adapter) == list(range(1, 51))
        ran = [verb for adapter_id, verb in ports.trainer.ran if adapter_id == adapter.adapter_id]
        assert ran == [cycle[number % 5] for number in range(1, 51)]
    assert max(map(len, ports.trainer.batches)) > 5


async def test_operations_after_a_refusal_fail_at_once() -> None:
    """Operations after a refused operation fail immediately and do not run, even if they arrive later."""
    ports = FakePorts()
    verbs = ports.verbs(gap_seconds=1000.0)
    (adapter,) = await _adapters(verbs, 1)
    sender = Sender(verbs)
    ports.trainer.gate.clear()
    sender.send(*(operation_of(adapter, number, LrStep()) for number in range(1, 6)))
    first = asyncio.ensure_future(sender.take(1))
    await let_others_run()
    ports.trainer.failures.append(InvalidField('x', 'is bad'))
    ports.trainer.gate.set()
    results = [*await first, *await sender.take(4)]
    assert numbers_of(results, adapter) == [1, 2, 3, 4, 5]
    errors = _errors(results)
    assert isinstance(errors[1], InvalidField)
    gaps = [errors[number] for number in range(2, 6)]
    assert all(isinstance(error, SequenceGap) and error.expected == 1 for error in gaps)
    sender.send(operation_of(adapter, 6, LrStep()))
    assert isinstance((await sender.take(1))[0].error, SequenceGap)
    sender.send(*(operation_of(adapter, number, Step()) for number in (1, 2, 3)), None)
    retried = [result async for result in sender.results]
    assert (numbers_of(retried, adapter), _errors(retried)) == ([1, 2, 3], {})
    assert [verb for _, verb in ports.trainer.ran] == [Step()] * 3


async def test_refusal_does_not_affect_other_adapters_of_the_stream() -> None:
    """A refusal does not affect other adapters of the stream."""
    ports = FakePorts()
    verbs = ports.verbs(gap_seconds=1000.0)
    broken, good = await _adapters(verbs, 2)
    malformed = OperationFailure(broken.adapter_id, 1, InvalidField('operation.verb', 'must be set'))
    sent = [operation_of(adapter, number, LrStep()) for number in (2, 3) for adapter in (broken, good)]
    results = await _send_all(verbs, [malformed, operation_of(good, 1, LrStep()), *sent])
    assert numbers_of(results, broken) == [1, 2, 3]
    assert numbers_of(results, good) == [1, 2, 3]
    assert all(result.adapter_id == broken.adapter_id for result in results if isinstance(result, OperationFailure))


async def test_malformed_operation_is_reported_in_order() -> None:
    """The failure of a malformed operation is returned in the order of the numbers."""
    ports = FakePorts()
    verbs = ports.verbs()
    (adapter,) = await _adapters(verbs, 1)
    ports.trainer.gate.clear()
    sender = Sender(verbs)
    malformed = OperationFailure(adapter.adapter_id, 3, InvalidField('operation.verb', 'must be set'))
    sender.send(operation_of(adapter, 1, LrStep()), operation_of(adapter, 2, LrStep()), malformed, None)
    reading = asyncio.ensure_future(sender.take(3))
    await let_others_run()
    ports.trainer.gate.set()
    assert numbers_of(await reading, adapter) == [1, 2, 3]


async def test_failure_that_uses_its_number_does_not_block_others() -> None:
    """Operations after a failed operation run if the failed operation consumed its number."""
    ports = FakePorts()
    verbs = ports.verbs()
    (adapter,) = await _adapters(verbs, 1)
    ports.trainer.failures.append(LossNotFinite(adapter.adapter_id, 0))
    results = await _send_all(verbs, (operation_of(adapter, number, LrStep()) for number in (1, 2, 3)))
    assert numbers_of(results, adapter) == [1, 2, 3]
    assert list(_errors(results)) == [1]


async def test_operations_after_a_temporary_refusal_wait() -> None:
    """Operations after a temporary refusal wait until the sender retries the refused operation."""
    ports = FakePorts()
    verbs = ports.verbs(gap_seconds=1000.0)
    (adapter,) = await _adapters(verbs, 1)
    ports.store.failures.append(ServiceUnreachable('checkpoint'))
    sender = Sender(verbs)
    sender.send(operation_of(adapter, 1, PublishVersion()), operation_of(adapter, 2, LrStep()))
    (refused,) = await sender.take(1)
    assert isinstance(refused.error, ServiceUnreachable)
    sender.send(operation_of(adapter, 1, PublishVersion()), None)
    results = [result async for result in sender.results]
    assert (numbers_of(results, adapter), _errors(results)) == ([1, 2], {})


async def test_a_number_sent_by_another_call_closes_the_gap() -> None:
    """A missing operation that arrives in another call closes the gap."""
    ports = FakePorts()
    verbs = ports.verbs()
    (adapter,) = await _adapters(verbs, 1)
    ports.trainer.failures.append(InvalidField('x', 'is bad'))
    sender = Sender(verbs)
    sender.send(operation_of(adapter, 1, LrStep()))
    assert isinstance((await sender.take(1))[0], OperationFailure)
    await execute(verbs, adapter, 1, Step())
    sender.send(operation_of(adapter, 2, Step()), None)
    (result,) = [result async for result in sender.results]
    assert result.sequence_number == 2
    assert not isinstance(result, OperationFailure)


async def test_full_queue_blocks_the_stream() -> None:
    """The stream reads one operation more than the tenant has slots and then waits; no operation is refused."""
    ports = FakePorts()
    verbs = ports.verbs(queue=QueueLimits(operation_count=5, request_bytes=1 << 20))
    (adapter,) = await _adapters(verbs, 1)
    ports.trainer.gate.clear()
    sender = Sender(verbs)
    sender.send(*(operation_of(adapter, number, LrStep()) for number in range(1, 31)), None)
    reading = asyncio.ensure_future(sender.take(30))
    await let_others_run(500)
    assert sender.read_count == 6
    ports.trainer.gate.set()
    results = await reading
    assert (numbers_of(results, adapter), _errors(results)) == (list(range(1, 31)), {})


async def test_byte_limit_blocks_the_stream() -> None:
    """If two large requests exceed the byte limit, the stream reads at most three before a result."""
    ports = FakePorts()
    verbs = ports.verbs(queue=QueueLimits(operation_count=100, request_bytes=1000))
    (adapter,) = await _adapters(verbs, 1)
    ports.trainer.gate.clear()
    sender = Sender(verbs)
    sender.send(*(operation_of(adapter, number, LrStep(), payload=bytes(600)) for number in range(1, 11)), None)
    reading = asyncio.ensure_future(sender.take(10))
    await let_others_run(500)
    # The first request runs; the second is admitted because it has the next number; the third waits for a slot.
    assert sender.read_count <= 3
    ports.trainer.gate.set()
    assert numbers_of(await reading, adapter) == list(range(1, 11))


async def test_slow_reader_blocks_the_stream() -> None:
    """The window and its queue limit the number of results that wait for a slow reader."""
    ports = FakePorts()
    verbs = ports.verbs(queue=QueueLimits(operation_count=1000, request_bytes=1 << 20))
    (adapter,) = await _adapters(verbs, 1)
    sender = Sender(verbs)
    sender.send(*(operation_of(adapter, number, LrStep()) for number in range(1, 401)), None)
    await sender.take(1)
    await let_others_run(5000)
    assert sender.read_count <= 2 * WINDOW + 2
    results = [result async for result in sender.results]
    assert numbers_of(results, adapter) == list(range(2, 401))


async def test_a_disconnected_stream_withdraws_waiting_operations() -> None:
    """If the caller disconnects, waiting operations are withdrawn and all slots are released."""
    ports = FakePorts()
    verbs = ports.verbs(queue=QueueLimits(operation_count=4, request_bytes=1 << 20))
    (adapter,) = await _adapters(verbs, 1)
    ports.trainer.gate.clear()
    sender = Sender(verbs)
    sender.send(*(operation_of(adapter, number, LrStep()) for number in range(1, 11)))
    async with aclosing(sender.results):
        reading = asyncio.ensure_future(sender.take(1))
        await let_others_run()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    ports.trainer.gate.set()
    await let_others_run()
    assert len(ports.trainer.ran) == 1
    results = [execute(verbs, adapter, number, LrStep()) for number in range(2, 6)]
    assert [result.sequence_number for result in await asyncio.gather(*results)] == [2, 3, 4, 5]


async def test_a_call_to_a_full_queue_is_refused_or_waits() -> None:
    """A call to a full queue is refused with a retry time, or waits for a slot if it allows this."""
    ports = FakePorts()
    verbs = ports.verbs(queue=QueueLimits(operation_count=2, request_bytes=1 << 20))
    busy, other = await _adapters(verbs, 2)
    ports.trainer.gate.clear()
    queued = [asyncio.ensure_future(execute(verbs, busy, number, LrStep())) for number in (1, 2)]
    await let_others_run()
    with pytest.raises(QueueFull) as caught:
        await execute(verbs, busy, 3, LrStep())
    assert caught.value.retry_after is not None
    waiting = asyncio.ensure_future(execute(verbs, busy, 3, LrStep(), is_waiting_allowed=True))
    # The next number of an adapter is urgent and never refused.
    urgent = asyncio.ensure_future(execute(verbs, other, 1, Step()))
    await let_others_run()
    assert not waiting.done()
    ports.trainer.gate.set()
    await asyncio.gather(*queued, waiting, urgent)
    assert len(ports.trainer.ran) == 4


async def test_stream_that_is_closed_early_raises_nothing() -> None:
    """Closing a stream between two results ends its generator without an error."""
    verbs = FakePorts().verbs()
    (adapter,) = await _adapters(verbs, 1)
    sender = Sender(verbs)
    sender.send(operation_of(adapter, 1, ZeroGrad()), operation_of(adapter, 2, ZeroGrad()))
    await sender.take(1)
    await sender.results.aclose()


async def test_operations_that_cannot_be_read_end_the_stream() -> None:
    """Results of earlier operations are returned before the error that ended the reading."""
    verbs = FakePorts().verbs()
    (adapter,) = await _adapters(verbs, 1)
    has_result = asyncio.Event()

    async def operations() -> AsyncIterator[Operation]:
        yield operation_of(adapter, 1, ZeroGrad())
        await has_result.wait()
        raise InvalidField('request', 'cannot be parsed')

    results = verbs.train_stream(ALICE, operations())
    assert (await anext(results)).sequence_number == 1
    has_result.set()
    with pytest.raises(BaseExceptionGroup) as caught:
        await anext(results)
    assert caught.group_contains(InvalidField)
