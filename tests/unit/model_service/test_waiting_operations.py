"""Waiting operations can be looked up, awaited, watched and cancelled; queues are restored with their record."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from fixtures.model_verbs import ALICE, BOB, FakePorts, create_request, execute, let_others_run, training
from twinkle.data_format import ForwardResult
from twinkle_services.kit.errors import AdapterNotFound, Cancelled, Draining, InvalidField
from twinkle_services.model.application.admission import QueueLimits
from twinkle_services.model.application.operations import OperationState
from twinkle_services.model.application.resident import ResidencyBounds
from twinkle_services.model.application.service import ModelService
from twinkle_services.model.application.train_stream import OperationFailure
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.errors import LossNotFinite, OperationNotFound, SequenceGap, SequenceReused
from twinkle_services.model.domain.journal import RecordEntry
from twinkle_services.model.domain.operation import LrStep, Operation, Step, Verb, ZeroGrad
from twinkle_services.model.domain.result import OperationResult, Receipt
from twinkle_services.model.domain.sequence import RECORD_BYTES, RECORD_LENGTH, Action, OperationSequence

LONG = timedelta(seconds=1000)


async def _adapters(verbs: ModelService, count: int) -> list[Adapter]:
    return [await verbs.create_adapter(ALICE, create_request(f'r{index}')) for index in range(count)]


def _start(verbs: ModelService, adapter: Adapter, number: int, verb: Verb) -> 'asyncio.Future[OperationResult]':
    return asyncio.ensure_future(execute(verbs, adapter, number, verb))


async def _state(verbs: ModelService, adapter: Adapter, number: int) -> OperationState:
    return (await verbs.operations.find(ALICE, adapter.adapter_id, number)).state


async def test_queued_running_done_and_failed_are_distinguished() -> None:
    """The state of an operation is queued, running, done or failed; an operation behind a gap is queued."""
    ports = FakePorts()
    verbs = ports.verbs()
    first, second = await _adapters(verbs, 2)
    ports.trainer.gate.clear()
    calls = [_start(verbs, first, 1, training()), _start(verbs, first, 2, Step()), _start(verbs, first, 9, Step())]
    await let_others_run()
    calls.append(_start(verbs, second, 1, training()))
    await let_others_run()
    states = [await _state(verbs, first, number) for number in (1, 2, 9)]
    assert states == [OperationState.RUNNING, OperationState.QUEUED, OperationState.QUEUED]
    assert await _state(verbs, second, 1) is OperationState.QUEUED
    for number in (3, 8, 10):
        with pytest.raises(OperationNotFound):
            await _state(verbs, first, number)
    ports.trainer.gate.set()
    await asyncio.gather(*calls[:2], calls[3])
    assert await _state(verbs, first, 2) is OperationState.DONE
    ports.trainer.failures.append(LossNotFinite(first.adapter_id, 0))
    with pytest.raises(LossNotFinite):
        await execute(verbs, first, 3, training())
    assert await _state(verbs, first, 3) is OperationState.FAILED
    calls[2].cancel()


async def test_queue_position_counts_earlier_operations() -> None:
    """The position counts earlier operations of all adapters; the estimated wait is based on earlier durations."""
    ports = FakePorts()
    verbs = ports.verbs(batch_tokens=64)
    adapters = await _adapters(verbs, 3)
    ports.trainer.gate.clear()
    warm = _start(verbs, adapters[0], 1, training(60))
    await let_others_run()
    ports.clock.advance(timedelta(seconds=6))
    ports.trainer.gate.set()
    await warm
    ports.trainer.gate.clear()
    calls = [_start(verbs, adapters[0], 2, training(60))]
    await let_others_run()
    calls += [_start(verbs, adapters[1], 1, training(60)), _start(verbs, adapters[2], 1, training(60))]
    calls += [_start(verbs, adapters[2], number, Step()) for number in (2, 3)]
    await let_others_run()
    records = [await verbs.operations.find(ALICE, adapters[2].adapter_id, number) for number in (1, 2, 3)]
    assert [record.queue_position for record in records] == [2, 3, 4]
    waits = [record.estimated_wait.total_seconds() for record in records]
    assert waits == pytest.approx([12.0, 18.0, 24.0])
    running = await verbs.operations.find(ALICE, adapters[0].adapter_id, 2)
    assert (running.queue_position, running.estimated_wait) == (0, timedelta())
    ports.trainer.gate.set()
    await asyncio.gather(*calls)


async def test_waiting_ends_with_the_operation() -> None:
    """A wait ends with the operation, whether it was queued or running; a refused operation is not found."""
    ports = FakePorts()
    verbs = ports.verbs()
    (adapter,) = await _adapters(verbs, 1)
    ports.trainer.gate.clear()
    calls = [_start(verbs, adapter, number, Step()) for number in (1, 2)]
    await let_others_run()
    finding = [asyncio.ensure_future(_wait(verbs, adapter, number)) for number in (1, 2)]
    await let_others_run()
    assert not any(future.done() for future in finding)
    ports.trainer.gate.set()
    assert [record.state for record in await asyncio.gather(*finding)] == [OperationState.DONE] * 2
    await asyncio.gather(*calls)
    ports.trainer.gate.clear()
    ports.trainer.failures.append(InvalidField('x', 'is bad'))
    refused = _start(verbs, adapter, 3, Step())
    await let_others_run()
    waiting = asyncio.ensure_future(_wait(verbs, adapter, 3))
    await let_others_run()
    ports.trainer.gate.set()
    with pytest.raises(OperationNotFound):
        await waiting
    with pytest.raises(InvalidField):
        await refused


async def _wait(verbs: ModelService, adapter: Adapter, number: int) -> Any:
    return await verbs.operations.find(ALICE, adapter.adapter_id, number, max_wait=LONG)


async def test_cancel_at_the_scheduler_frees_the_number() -> None:
    """An operation that is cancelled in the scheduler never runs, and another operation can use its sequence number."""
    ports = FakePorts()
    verbs = ports.verbs()
    busy, adapter = await _adapters(verbs, 2)
    ports.trainer.gate.clear()
    running = _start(verbs, busy, 1, Step())
    await let_others_run()
    waiting, next_operation = _start(verbs, adapter, 1, training()), _start(verbs, adapter, 2, LrStep())
    await let_others_run()
    assert await verbs.operations.cancel(ALICE, adapter.adapter_id, 1)
    with pytest.raises(Cancelled):
        await waiting
    assert verbs.directory.get(ALICE, adapter.adapter_id).sequence_number == 0
    ports.trainer.gate.set()
    await running
    await let_others_run()
    assert not next_operation.done()
    await execute(verbs, adapter, 1, ZeroGrad())
    await next_operation
    assert [verb for adapter_id, verb in ports.trainer.ran if adapter_id == adapter.adapter_id] == [
        ZeroGrad(),
        LrStep(),
    ]


async def test_cancel_of_an_early_number() -> None:
    """A cancelled operation that is too early can be sent again with other content."""
    ports = FakePorts()
    verbs = ports.verbs()
    (adapter,) = await _adapters(verbs, 1)
    early = _start(verbs, adapter, 2, Step())
    await let_others_run()
    assert await verbs.operations.cancel(ALICE, adapter.adapter_id, 2)
    with pytest.raises(Cancelled):
        await early
    await execute(verbs, adapter, 1, Step())
    await execute(verbs, adapter, 2, ZeroGrad())
    assert [verb for _, verb in ports.trainer.ran] == [Step(), ZeroGrad()]


async def test_cancel_has_no_effect_on_running_or_finished_operations() -> None:
    """Cancelling a running or finished operation has no effect; an unknown operation is not found."""
    ports = FakePorts()
    verbs = ports.verbs()
    (adapter,) = await _adapters(verbs, 1)
    ports.trainer.gate.clear()
    running = _start(verbs, adapter, 1, Step())
    await let_others_run()
    assert not await verbs.operations.cancel(ALICE, adapter.adapter_id, 1)
    ports.trainer.gate.set()
    await running
    assert not await verbs.operations.cancel(ALICE, adapter.adapter_id, 1)
    with pytest.raises(OperationNotFound):
        await verbs.operations.cancel(ALICE, adapter.adapter_id, 2)
    with pytest.raises(AdapterNotFound):
        await verbs.operations.cancel(BOB, adapter.adapter_id, 1)


async def test_a_cancelled_operation_is_not_in_the_journal() -> None:
    """A cancelled operation is not in the journal, so a restart does not revive it."""
    ports = FakePorts()
    verbs = ports.verbs()
    busy, adapter = await _adapters(verbs, 2)
    ports.trainer.gate.clear()
    running = _start(verbs, busy, 1, Step())
    await let_others_run()
    waiting = _start(verbs, adapter, 1, training())
    await let_others_run()
    assert await verbs.operations.cancel(ALICE, adapter.adapter_id, 1)
    assert list(await ports.journal.record(adapter.adapter_id, size=10)) == []
    ports.trainer.gate.set()
    await asyncio.gather(running, waiting, return_exceptions=True)


async def _take(watch: AsyncGenerator[Any, None], count: int) -> list[Any]:
    return [await anext(watch) for _ in range(count)]


async def test_parking_cancels_operations_without_a_slot() -> None:
    """Parking cancels the adapter's operations that wait for a slot of the tenant's queue, and no others."""
    ports = FakePorts()
    verbs = ports.verbs(queue=QueueLimits(operation_count=2, request_bytes=1 << 20))
    first, second, *others = await _adapters(verbs, 4)
    ports.trainer.gate.clear()
    running = [_start(verbs, adapter, 1, training()) for adapter in others]
    await let_others_run()
    # The next operation of an adapter would be admitted beyond the limit.
    waiting = [
        asyncio.ensure_future(execute(verbs, adapter, 2, Step(), is_waiting_allowed=True))
        for adapter in (second, first)
    ]
    await let_others_run()
    await verbs.park_adapter(replace(ALICE, is_internal=True), second.adapter_id)
    with pytest.raises(Cancelled):
        await waiting[0]
    assert not waiting[1].done()
    waiting[1].cancel()
    ports.trainer.gate.set()
    await asyncio.gather(*running)


@pytest.mark.parametrize('end', ['deletion', 'shutdown'])
async def test_wait_for_memory_ends_with_the_adapter_and_with_the_service(end) -> None:
    """A deletion and a shutdown end an operation that waits for memory; neither waits for the memory."""
    ports = FakePorts()
    verbs = ports.verbs(residency=ResidencyBounds(resident_adapters=1))
    first, second = await _adapters(verbs, 2)
    ports.trainer.gate.clear()
    running = _start(verbs, second, 1, training())
    await let_others_run()
    waiting = _start(verbs, first, 1, training())
    await let_others_run()
    if end == 'deletion':
        await verbs.delete_adapter(ALICE, first.adapter_id)
    closing = asyncio.ensure_future(verbs.close())
    with pytest.raises(AdapterNotFound if end == 'deletion' else Draining):
        await waiting
    ports.trainer.gate.set()
    await running
    await closing


async def test_watch_sends_recorded_and_later_outcomes() -> None:
    """A watch returns each recorded and new outcome after a number once, including failures but not refusals."""
    ports = FakePorts()
    verbs = ports.verbs()
    (adapter,) = await _adapters(verbs, 1)
    for number in (1, 2):
        await execute(verbs, adapter, number, LrStep())
    watch = verbs.operations.watch(ALICE, adapter.adapter_id, after=1)
    received = await _take(watch, 1)
    following = asyncio.ensure_future(_take(watch, 3))
    await let_others_run()
    ports.trainer.failures += [InvalidField('x', 'is bad'), LossNotFinite(adapter.adapter_id, 0)]
    with pytest.raises(InvalidField):
        await execute(verbs, adapter, 3, LrStep())
    with pytest.raises(LossNotFinite):
        await execute(verbs, adapter, 3, Step())
    for number in (4, 5):
        await execute(verbs, adapter, number, LrStep())
    received += await following
    assert [result.sequence_number for result in received] == [2, 3, 4, 5]
    assert [isinstance(result, OperationFailure) for result in received] == [False, True, False, False]
    await watch.aclose()


async def test_a_slow_watcher_gets_an_error() -> None:
    """A watcher that falls behind the record gets OperationNotFound."""
    ports = FakePorts()
    verbs = ports.verbs()
    (adapter,) = await _adapters(verbs, 1)
    await execute(verbs, adapter, 1, LrStep())
    watch = verbs.operations.watch(ALICE, adapter.adapter_id, after=0)
    assert (await anext(watch)).sequence_number == 1
    for number in range(2, RECORD_LENGTH + 5):
        await execute(verbs, adapter, number, LrStep())
    with pytest.raises(OperationNotFound):
        await anext(watch)


async def test_watch_ends_with_the_adapter_and_with_the_service() -> None:
    """Deleting the adapter or closing the service closes the watches."""
    ports = FakePorts()
    verbs = ports.verbs()
    first, second = await _adapters(verbs, 2)
    watches = [verbs.operations.watch(ALICE, adapter.adapter_id, after=0) for adapter in (first, second)]
    waiting = [asyncio.ensure_future(_take(watch, 1)) for watch in watches]
    await let_others_run()
    await verbs.delete_adapter(ALICE, first.adapter_id)
    with pytest.raises(AdapterNotFound):
        await waiting[0]
    verbs.operations.close()
    with pytest.raises(Draining):
        await waiting[1]
    with pytest.raises(AdapterNotFound):
        await anext(verbs.operations.watch(BOB, second.adapter_id, after=0))


async def test_each_operation_has_a_separate_gap_timeout() -> None:
    """Each operation has its own timeout for a gap; none is refused after the missing operation has arrived."""
    ports = FakePorts()
    verbs = ports.verbs(gap_seconds=0.05)
    (adapter,) = await _adapters(verbs, 1)
    early = _start(verbs, adapter, 3, Step())
    with pytest.raises(SequenceGap) as caught:
        await early
    assert (caught.value.sequence_number, caught.value.expected) == (3, 1)
    waiting = _start(verbs, adapter, 2, LrStep())
    await let_others_run()
    await execute(verbs, adapter, 1, Step())
    await waiting


async def test_long_running_operation_is_not_a_gap() -> None:
    """An operation after a running operation waits longer than the gap timeout."""
    ports = FakePorts()
    verbs = ports.verbs(gap_seconds=0.01)
    (adapter,) = await _adapters(verbs, 1)
    ports.trainer.gate.clear()
    calls = [_start(verbs, adapter, number, LrStep()) for number in (1, 2)]
    with pytest.raises(TimeoutError):
        # The wait is longer than the gap timeout, which must not apply here.
        await asyncio.wait_for(asyncio.shield(calls[1]), 0.05)
    ports.trainer.gate.set()
    await asyncio.gather(*calls)


def _operation(number: int, verb: Verb, fingerprint: str) -> Operation:
    return Operation(adapter_id='a', sequence_number=number, verb=verb, fingerprint=fingerprint)


def _result(number: int, size_bytes: int = 0, *, field: str = 'logps') -> OperationResult:
    outcome = ForwardResult(loss=0.0, num_tokens=1, **{field: [np.zeros(size_bytes // 4, np.float32)]})
    return OperationResult(adapter_id='a', sequence_number=number, outcome=outcome, receipt=Receipt())


def test_restored_sequence_continues_with_the_next_number() -> None:
    """A restored sequence recognizes repeats, refuses changed repeats and continues with the next number."""
    entries = [
        RecordEntry(sequence_number=7, fingerprint='f7', outcome=_result(7)),
        RecordEntry(sequence_number=8, fingerprint='f8', outcome=LossNotFinite('a')),
    ]
    sequence = OperationSequence.restored('a', entries, 8)
    assert sequence.action_for(_operation(7, Step(), 'f7')) is Action.REPEAT
    assert isinstance(sequence.entry(8).error, LossNotFinite)
    with pytest.raises(SequenceReused):
        sequence.action_for(_operation(8, Step(), 'other'))
    with pytest.raises(OperationNotFound):
        sequence.action_for(_operation(6, Step(), 'f6'))
    assert sequence.action_for(_operation(9, Step(), 'f9')) is Action.RUN
    assert sequence.action_for(_operation(10, Step(), 'f10')) is Action.WAIT


def test_a_restored_sequence_may_have_no_record() -> None:
    """A sequence can be restored from its last number only; earlier operations are then not found."""
    sequence = OperationSequence.restored('a', [], 5)
    assert sequence.action_for(_operation(6, Step(), 'f')) is Action.RUN
    with pytest.raises(OperationNotFound):
        sequence.action_for(_operation(5, Step(), 'f'))


@pytest.mark.parametrize('field', ['logps', 'values', 'routed_experts'])
def test_the_record_is_bounded_in_bytes(field: str) -> None:
    """Large results remove old results from the record; the newest result always stays."""
    sequence = OperationSequence('a')
    for number in range(1, 11):
        sequence.begin(_operation(number, Step(), f'f{number}'))
        sequence.finish(number, _result(number, RECORD_BYTES // 3, field=field))
    assert sequence.entry(10).result is not None
    assert sequence.entry(8).result is not None
    with pytest.raises(OperationNotFound):
        sequence.entry(7)
    sequence.begin(_operation(11, Step(), 'f11'))
    sequence.finish(11, _result(11, 2 * RECORD_BYTES, field=field))
    assert sequence.entry(11).result is not None
    with pytest.raises(OperationNotFound):
        sequence.entry(10)
    sequence.begin(_operation(12, Step(), 'f12'))
    sequence.finish(12, _result(12, 8))
    assert sequence.entry(12).result is not None
