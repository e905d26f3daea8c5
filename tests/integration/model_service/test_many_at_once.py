"""Many tenants and operations over real sockets: order, shared passes, overload, cancellation and watching."""

import asyncio
from contextlib import suppress
from datetime import timedelta

import grpc
import pytest

from fixtures.checkpoint_service import as_tenant, failure_of
from fixtures.fake_model_service import serving_fake
from fixtures.model_service import draw_example, forward_backward, operation_of
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_service_pb2
from twinkle_services.model.application.admission import QueueLimits

STEP = operation_pb2.Step(learning_rate=0.1)
LR_STEP = operation_pb2.LrStep()
QUEUED, RUNNING, DONE = (
    training_service_pb2.OPERATION_STATE_QUEUED,
    training_service_pb2.OPERATION_STATE_RUNNING,
    training_service_pb2.OPERATION_STATE_DONE,
)


@pytest.fixture
async def fake(tmp_path):
    """A service with the fake trainer and default limits."""
    async with serving_fake(tmp_path) as running:
        yield running


def train(seed=0, length=12):
    """Return forward_backward over one example."""
    return {'forward_backward': forward_backward([draw_example(length, seed)])}


async def stream(service, tenant, operations):
    """Send operations in one stream; return the results."""

    async def requests():
        for operation in operations:
            yield training_service_pb2.TrainRequest(operation=operation)

    return [response.result async for response in service.training.Train(requests(), metadata=as_tenant(tenant))]


async def find(service, adapter_id, number, *, tenant='alice'):
    request = training_service_pb2.GetOperationRequest(adapter_id=adapter_id, sequence_number=number)
    return await service.training.GetOperation(request, metadata=as_tenant(tenant))


async def until(service, adapter_id, number, state, *, tenant='alice'):
    """Wait until an operation's record has this state, and return the record."""
    while True:
        with suppress(grpc.aio.AioRpcError):
            found = await find(service, adapter_id, number, tenant=tenant)
            if found.state == state:
                return found


def call(service, adapter_id, number, *, tenant='alice', **verb):
    """Start a call of Execute."""
    return asyncio.ensure_future(service.result(adapter_id, number, tenant=tenant, **verb))


async def test_streams_of_two_tenants_share_passes(fake):
    """Ready operations of two tenants share passes, and each stream gets its own results in order."""
    sent = {}
    for tenant in ('alice', 'bob'):
        ids = [(await fake.create(tenant=tenant, request_id=f'r{index}')).adapter_id for index in range(4)]
        verbs = [train(1), train(2), {'step': STEP}] * 10
        sent[tenant] = [operation_of(a, number, **verb) for number, verb in enumerate(verbs, 1) for a in ids]
    results_by_stream = await asyncio.gather(*(stream(fake, tenant, operations) for tenant, operations in sent.items()))
    for results, operations in zip(results_by_stream, sent.values(), strict=True):
        for adapter_id in {operation.adapter_id for operation in operations}:
            own = [result for result in results if result.adapter_id == adapter_id]
            assert [result.sequence_number for result in own] == list(range(1, 31))
            assert not any(result.HasField('error') for result in own)
        assert max(result.receipt.pass_adapter_count for result in results) > 1
        assert all(result.receipt.queue_time.ToTimedelta().total_seconds() >= 0 for result in results)
    owners = {operation.adapter_id: tenant for tenant, operations in sent.items() for operation in operations}
    assert any(len({owners[adapter_id] for adapter_id in batch}) == 2 for batch in fake.trainer.batches)


async def test_a_step_runs_before_a_long_queue_of_batches(fake):
    """A tenant's step runs next, although another tenant has sent fifty large batches before it."""
    busy = [(await fake.create(request_id=f'r{index}')).adapter_id for index in range(50)]
    quick = (await fake.create(tenant='carol')).adapter_id
    fake.trainer.gate.clear()
    calls = [call(fake, busy[0], 1, **train(0, 500))]
    # The other batches are in the queue only once this batch runs.
    await until(fake, busy[0], 1, RUNNING)
    calls += [call(fake, adapter_id, 1, **train(index, 500)) for index, adapter_id in enumerate(busy[1:], 1)]
    await asyncio.gather(*(until(fake, adapter_id, 1, QUEUED) for adapter_id in busy[1:]))
    step = call(fake, quick, 1, tenant='carol', step=STEP)
    found = await until(fake, quick, 1, QUEUED, tenant='carol')
    assert found.queue_position == 1
    assert (await find(fake, busy[-1], 1)).queue_position > 1
    fake.trainer.gate.set()
    await step
    await asyncio.gather(*calls)
    order = [adapter_id for batch in fake.trainer.batches for adapter_id in batch]
    assert order.index(quick) == len(fake.trainer.batches[0])


async def test_a_thousand_pipelined_operations_of_twenty_adapters_keep_their_order(fake):
    """Five streams of four adapters each run every operation once, in the order of the numbers."""
    groups = [
        [(await fake.create(request_id=f'r{group}-{index}')).adapter_id for index in range(4)] for group in range(5)
    ]

    def operations(ids):
        for number in range(1, 51):
            for adapter_id in ids:
                verb = train(number) if number % 2 else {'step': operation_pb2.Step(learning_rate=number * 1e-6)}
                yield operation_of(adapter_id, number, **verb)

    results = await asyncio.gather(*(stream(fake, 'alice', operations(ids)) for ids in groups))
    for group, ids in zip(results, groups, strict=True):
        for adapter_id in ids:
            own = [result.sequence_number for result in group if result.adapter_id == adapter_id]
            assert own == list(range(1, 51))
            rates = [verb.learning_rate for ran_id, verb in fake.trainer.ran if ran_id == adapter_id and rate_of(verb)]
            assert rates == [number * 1e-6 for number in range(2, 51, 2)]
    assert len(fake.trainer.ran) == 1000


def rate_of(verb):
    """Return the learning rate of a step, or None for another verb."""
    return getattr(verb, 'learning_rate', None)


async def test_overload_is_refused_with_a_retry_time_or_waits(tmp_path):
    """A full queue refuses a call, or keeps it waiting if the request allows this; other tenants are not affected."""
    async with serving_fake(tmp_path, queue=QueueLimits(operation_count=3, request_bytes=1 << 20)) as fake:
        adapter_id, foreign = (await fake.create()).adapter_id, (await fake.create(tenant='bob')).adapter_id
        fake.trainer.gate.clear()
        queued_calls = [call(fake, adapter_id, number, lr_step=LR_STEP) for number in (1, 2, 3)]
        for number, state in ((1, RUNNING), (2, QUEUED), (3, QUEUED)):
            await until(fake, adapter_id, number, state)
        failure = await failure_of(fake.execute(adapter_id, 4, lr_step=LR_STEP))
        assert (failure.code, failure.reason) == ('RESOURCE_EXHAUSTED', 'QUEUE_FULL')
        assert failure.metadata == {'queueLength': '3', 'queueLimit': '3'}
        request = training_service_pb2.ExecuteRequest(
            operation=operation_of(adapter_id, 4, lr_step=LR_STEP), is_waiting_allowed=True
        )
        waiting_call = fake.training.Execute(request, metadata=as_tenant('alice'))
        other = call(fake, foreign, 1, tenant='bob', lr_step=LR_STEP)
        await until(fake, foreign, 1, QUEUED, tenant='bob')
        fake.trainer.gate.set()
        assert (await waiting_call).result.sequence_number == 4
        await asyncio.gather(other, *queued_calls)


async def test_a_cancelled_operation_fails_and_frees_its_number(fake):
    """A cancelled operation frees its number; an operation in its last pass completes despite the cancellation."""
    busy, adapter_id = (await fake.create(request_id='r1')).adapter_id, (await fake.create(request_id='r2')).adapter_id
    fake.trainer.gate.clear()
    running = call(fake, busy, 1, **train())
    await until(fake, busy, 1, RUNNING)
    waiting = fake.execute(adapter_id, 1, **train(3, 500))
    next_call = call(fake, adapter_id, 2, lr_step=LR_STEP)
    for number in (1, 2):
        await until(fake, adapter_id, number, QUEUED)

    async def cancel(target, number):
        request = training_service_pb2.CancelOperationRequest(adapter_id=target, sequence_number=number)
        return (await fake.training.CancelOperation(request, metadata=as_tenant('alice'))).is_cancelled

    cancelling = asyncio.ensure_future(cancel(busy, 1))
    assert await cancel(adapter_id, 1)
    failure = await failure_of(waiting)
    assert (failure.code, failure.reason) == ('CANCELLED', 'CANCELLED')
    fake.trainer.gate.set()
    await running
    assert not await cancelling
    await fake.result(adapter_id, 1, step=STEP)
    assert (await next_call).sequence_number == 2
    assert [verb for ran_id, verb in fake.trainer.ran if ran_id == adapter_id and rate_of(verb)]


async def test_a_long_operation_is_cancelled_between_its_passes(fake):
    """A cancelled operation of several passes ends after its current pass, frees its number and changes nothing."""
    adapter_id = (await fake.create()).adapter_id
    fake.trainer.pass_tokens = 64
    before = await fake.trainer.snapshot(adapter_id)
    fake.trainer.gate.clear()
    running = fake.execute(adapter_id, 1, **train(0, 400))
    await until(fake, adapter_id, 1, RUNNING)
    request = training_service_pb2.CancelOperationRequest(adapter_id=adapter_id, sequence_number=1)
    cancelling = asyncio.ensure_future(fake.training.CancelOperation(request, metadata=as_tenant('alice')))
    for _ in range(5):
        # The service receives the cancellation before these calls, which use the same connection.
        await until(fake, adapter_id, 1, RUNNING)
    fake.trainer.gate.set()
    assert (await cancelling).is_cancelled
    assert (await failure_of(running)).code == 'CANCELLED'
    assert len(fake.trainer.batches) == 1
    assert await fake.trainer.snapshot(adapter_id) == before
    await fake.result(adapter_id, 1, lr_step=LR_STEP)


async def test_watcher_receives_every_result_until_the_deletion(fake):
    """A watcher receives all results in order, beginning with recorded ones, until the adapter is deleted."""
    adapter_id = (await fake.create()).adapter_id
    for number in (1, 2, 3):
        await fake.result(adapter_id, number, lr_step=LR_STEP)
    request = training_service_pb2.WatchOperationsRequest(adapter_id=adapter_id, after_sequence_number=1)
    watch = aiter(fake.training.WatchOperations(request, metadata=as_tenant('alice')))
    received = [(await anext(watch)).result.sequence_number for _ in range(2)]
    results = await stream(
        fake, 'alice', [operation_of(adapter_id, number, lr_step=LR_STEP) for number in range(4, 20)]
    )
    assert len(results) == 16
    received += [(await anext(watch)).result.sequence_number for _ in range(16)]
    assert received == list(range(2, 20))
    delete = adapter_service_pb2.DeleteAdapterRequest(adapter_id=adapter_id)
    await fake.adapters.DeleteAdapter(delete, metadata=as_tenant('alice'))
    failure = await failure_of(anext(watch))
    assert (failure.code, failure.reason) == ('NOT_FOUND', 'ADAPTER_NOT_FOUND')


async def test_shutdown_closes_watches_and_completes_operations(fake):
    """A shutdown closes watches with an error; within the grace time, running and waiting operations complete."""
    busy, adapter_id = (await fake.create(request_id='r1')).adapter_id, (await fake.create(request_id='r2')).adapter_id
    request = training_service_pb2.WatchOperationsRequest(adapter_id=busy)
    watch = aiter(fake.training.WatchOperations(request, metadata=as_tenant('alice')))
    running = call(fake, busy, 1, lr_step=LR_STEP)
    assert (await anext(watch)).result.sequence_number == 1
    await running
    fake.trainer.gate.clear()
    running = call(fake, busy, 2, lr_step=LR_STEP)
    await until(fake, busy, 2, RUNNING)
    waiting = call(fake, adapter_id, 1, lr_step=LR_STEP)
    await until(fake, adapter_id, 1, QUEUED)
    fake.trainer.gate.set()
    await fake.stop(timedelta(seconds=30))
    assert (await failure_of(anext(watch))).reason == 'DRAINING'
    assert [result.sequence_number for result in await asyncio.gather(running, waiting)] == [2, 1]
