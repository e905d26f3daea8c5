"""Uploads, extra tensors, parameter groups, health, undo, watches and estimates over a real socket."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256

import grpc
import numpy as np
import pytest
from blake3 import blake3

from fixtures.checkpoint_service import ALICE as INTERNAL_ALICE
from fixtures.checkpoint_service import as_tenant, failure_of
from fixtures.fake_samplers import until
from fixtures.model_service import batch_of, draw_example, forward_backward
from twinkle.api.checkpoint.v1 import version_service_pb2, version_service_pb2_grpc
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_config_pb2, training_service_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.checkpoint_engine import chunk_checksum
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.rpc.tensors import tensor_to_proto

ALICE, BOB = as_tenant('alice'), as_tenant('bob')
BATCH = [draw_example(10, 1), draw_example(17, 2)]


def parts(data: bytes, *, begin: int = 0, end: int | None = None, upload_id: str = 'up', digest: str = ''):
    """Yield the messages of an upload, or of a part of it."""
    header = training_service_pb2.BatchHeader(
        upload_id=upload_id, size_bytes=len(data), digest=digest or blake3(data).hexdigest()
    )
    yield training_service_pb2.UploadBatchRequest(header=header)
    for offset in range(begin, len(data) if end is None else end, 100):
        piece = data[offset : min(offset + 100, len(data) if end is None else end)]
        chunk = tensor_pb2.TensorChunk(offset=offset, data=piece, checksum=chunk_checksum(piece))
        yield training_service_pb2.UploadBatchRequest(chunk=chunk)


def bare_parts(data: bytes, *, has_sha256: bool) -> Iterator[training_service_pb2.UploadBatchRequest]:
    """Yield the messages of an upload without blake3 and xxh3, with SHA-256 digests or without any."""
    for message in parts(data):
        if message.HasField('header'):
            message.header.digest, message.header.sha256 = '', sha256(data).digest() if has_sha256 else b''
        else:
            message.chunk.ClearField('checksum')
            message.chunk.sha256 = sha256(message.chunk.data).digest() if has_sha256 else b''
        yield message


def edited(data: bytes, **fields: bytes) -> list[training_service_pb2.UploadBatchRequest]:
    """Return the messages of an upload without digests, in which a header or the first chunk has other fields."""
    messages = list(bare_parts(data, has_sha256=False))
    if 'header' in fields:
        messages[0].header.sha256 = fields['header']
    if 'chunk' in fields:
        messages[1].chunk.sha256 = fields['chunk']
    return messages


async def logprobs_of(service, adapter_id: str, number: int) -> list[bytes]:
    """Return the adapter's log-probabilities of the batch."""
    verb = operation_pb2.ForwardOnly(batch=batch_of(BATCH))
    result = await service.result(adapter_id, number, forward_only=verb)
    return [tensor.data for tensor in result.forward.logprobs]


async def test_uploaded_batch_trains_like_an_inline_one(service):
    """A resumed upload is the same batch as an inline batch, so the operation with the inline batch is a repeat."""
    adapter_id = (await service.create()).adapter_id
    data = batch_of(BATCH).features.SerializeToString(deterministic=True)
    first = await service.training.UploadBatch(parts(data, end=150), metadata=ALICE)
    assert first.committed_bytes == 150
    response = await service.training.UploadBatch(parts(data, end=0), metadata=ALICE)
    whole = await service.training.UploadBatch(parts(data, begin=response.committed_bytes), metadata=ALICE)
    assert whole.committed_bytes == len(data)
    verb = operation_pb2.ForwardBackward(batch=operation_pb2.Batch(upload_id='up'))
    uploaded = await service.result(adapter_id, 1, forward_backward=verb)
    repeated = await service.result(adapter_id, 1, forward_backward=forward_backward(BATCH))
    assert (repeated.is_replayed, repeated.forward.loss) == (True, uploaded.forward.loss)


@pytest.mark.parametrize('has_sha256', [True, False])
async def test_upload_needs_neither_blake3_nor_xxh3(service, has_sha256):
    """An upload with SHA-256, or without checksums, is the same batch as an inline one."""
    adapter_id = (await service.create()).adapter_id
    data = batch_of(BATCH).features.SerializeToString(deterministic=True)
    response = await service.training.UploadBatch(bare_parts(data, has_sha256=has_sha256), metadata=ALICE)
    assert response.committed_bytes == len(data)
    verb = operation_pb2.ForwardBackward(batch=operation_pb2.Batch(upload_id='up'))
    await service.result(adapter_id, 1, forward_backward=verb)
    repeated = await service.result(adapter_id, 1, forward_backward=forward_backward(BATCH))
    assert repeated.is_replayed


@pytest.mark.parametrize(
    ('fields', 'reason', 'field'),
    [
        ({'header': bytes(32)}, 'DIGEST_MISMATCH', 'header.sha256'),
        ({'header': b'a' * 64}, 'INVALID_FIELD', 'header.sha256'),
        ({'chunk': bytes(32)}, 'CHUNK_CORRUPT', 'chunk.sha256'),
        ({'chunk': b'a' * 64}, 'INVALID_FIELD', 'chunk.sha256'),
    ],
)
async def test_wrong_sha256_is_refused_with_its_field(service, fields, reason, field):
    """A SHA-256 digest that does not match or is malformed is refused, and the error names the field."""
    data = batch_of(BATCH).features.SerializeToString()
    failure = await failure_of(service.training.UploadBatch(iter(edited(data, **fields)), metadata=ALICE))
    assert (failure.reason, failure.metadata['field']) == (reason, field)


async def test_upload_is_private_to_its_tenant(service):
    """A tenant cannot use another tenant's upload, and the refused operation does not consume its number."""
    data = batch_of(BATCH).features.SerializeToString()
    await service.training.UploadBatch(parts(data), metadata=ALICE)
    adapter_id = (await service.create(tenant='bob')).adapter_id
    verb = operation_pb2.ForwardBackward(batch=operation_pb2.Batch(upload_id='up'))
    failure = await failure_of(service.execute(adapter_id, 1, tenant='bob', forward_backward=verb))
    assert (failure.code, failure.reason) == ('NOT_FOUND', 'UPLOAD_NOT_FOUND')
    await service.result(adapter_id, 1, tenant='bob', zero_grad=operation_pb2.ZeroGrad())


@pytest.mark.parametrize(
    ('messages', 'reason'),
    [
        (lambda data: list(parts(data))[1:], 'STREAM_OUT_OF_ORDER'),
        (lambda data: parts(data, begin=100), 'STREAM_OUT_OF_ORDER'),
        (lambda data: parts(data, digest='0' * 64), 'DIGEST_MISMATCH'),
        (lambda data: parts(data, digest='nonsense'), 'INVALID_FIELD'),
        (lambda data: parts(data, upload_id=''), 'INVALID_FIELD'),
        (lambda data: [training_service_pb2.UploadBatchRequest()], 'INVALID_FIELD'),
    ],
)
async def test_hostile_upload_is_refused(service, messages, reason):
    """The error for each malformed or damaged upload has its reason."""
    data = batch_of(BATCH).features.SerializeToString()
    failure = await failure_of(service.training.UploadBatch(iter(messages(data)), metadata=ALICE))
    assert failure.reason == reason


async def test_damaged_chunk_is_reported_with_its_offset(service):
    """The error for a damaged chunk contains the chunk's offset, and earlier chunks are stored."""
    data = batch_of(BATCH).features.SerializeToString()
    messages = list(parts(data))
    messages[2].chunk.data = b'x' * 100
    failure = await failure_of(service.training.UploadBatch(iter(messages), metadata=ALICE))
    assert (failure.reason, failure.metadata['offset']) == ('CHUNK_CORRUPT', '100')
    response = await service.training.UploadBatch(parts(data, end=0), metadata=ALICE)
    assert response.committed_bytes == 100


async def test_extra_tensors_are_used_by_their_loss(service):
    """A distillation loss uses the teacher's top tokens; an operation without them is refused."""
    config = training_config_pb2.TrainingConfig(
        loss=training_config_pb2.LossConfig(name='GKDLoss'),
    )
    adapter_id = (await service.create(training_config=config)).adapter_id
    verb = forward_backward([draw_example()])
    incomplete = await failure_of(service.execute(adapter_id, 1, forward_backward=verb))
    assert (incomplete.code, 'teacher' in incomplete.message) == ('INVALID_ARGUMENT', True)
    extra = verb.batch.features.features[0].extra_tensors
    extra['teacher_topk_ids'].CopyFrom(tensor_to_proto(np.tile(np.arange(4, dtype=np.int32), (12, 1))))
    extra['teacher_topk_logps'].CopyFrom(tensor_to_proto(np.full((12, 4), -1.5, np.float32)))
    result = await service.result(adapter_id, 1, forward_backward=verb)
    assert np.isfinite(result.forward.loss)


async def test_policy_loss_keeps_its_scaling(service):
    """A loss with a fixed reduction can be set by its name; a mean reduction is refused for this loss."""
    adapter_id = (await service.create()).adapter_id
    loss = training_config_pb2.LossConfig(name='GRPOLoss')
    verb = operation_pb2.Configure(training_config=training_config_pb2.TrainingConfig(loss=loss))
    await service.result(adapter_id, 1, configure=verb)
    loss.reduction = training_config_pb2.LOSS_REDUCTION_MEAN
    verb = operation_pb2.Configure(training_config=training_config_pb2.TrainingConfig(loss=loss))
    failure = await failure_of(service.execute(adapter_id, 2, configure=verb))
    assert failure.code == 'INVALID_ARGUMENT'


async def test_sum_without_effect_gives_a_warning(service):
    """If a loss ignores the requested sum, creation and configuration warn, and the reduction is reported as unset."""
    plain, own = (
        training_config_pb2.LossConfig(name='CrossEntropyLoss'),
        training_config_pb2.LossConfig(name='GRPOLoss'),
    )
    plain.reduction = own.reduction = training_config_pb2.LOSS_REDUCTION_SUM
    request = adapter_service_pb2.CreateAdapterRequest(
        request_id='r1', base_model=service.base_model, training_config={'loss': own}
    )
    created = await service.adapters.CreateAdapter(request, metadata=ALICE)
    repeated = await service.adapters.CreateAdapter(request, metadata=ALICE)
    assert repeated.warnings == created.warnings
    (warning,) = created.warnings
    assert 'training_config.loss.reduction' in warning
    assert created.adapter.training_config.loss.reduction == training_config_pb2.LOSS_REDUCTION_UNSPECIFIED
    adapter_id, reported = created.adapter.adapter_id, []
    for number, loss in enumerate((plain, own, training_config_pb2.LossConfig(name='GRPOLoss')), 1):
        change = operation_pb2.Configure(training_config=training_config_pb2.TrainingConfig(loss=loss))
        warnings = (await service.result(adapter_id, number, configure=change)).warnings
        get = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
        adapter = (await service.adapters.GetAdapter(get, metadata=ALICE)).adapter
        reported.append((list(warnings), adapter.training_config.loss.reduction))
    unset, summed = training_config_pb2.LOSS_REDUCTION_UNSPECIFIED, training_config_pb2.LOSS_REDUCTION_SUM
    assert reported == [([], summed), ([warning], unset), ([], unset)]


async def test_evaluation_metrics_gather_forward_only_batches(service):
    """An evaluation metric reports forward-only batches and not training batches."""
    adapter_id = (await service.create()).adapter_id
    config = training_config_pb2.TrainingConfig(evaluation_metrics=[{'name': 'Accuracy'}])
    await service.result(adapter_id, 1, configure=operation_pb2.Configure(training_config=config))
    batch = batch_of([draw_example()])
    await service.result(adapter_id, 2, forward_only=operation_pb2.ForwardOnly(batch=batch))
    await service.result(adapter_id, 3, forward_backward=operation_pb2.ForwardBackward(batch=batch))
    evaluated = [
        (
            await service.result(adapter_id, number, calculate_metric=operation_pb2.CalculateMetric(is_training=flag))
        ).metric
        for number, flag in ((4, False), (5, True))
    ]
    assert ['accuracy' in metric.values for metric in evaluated] == [True, False]
    get = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
    adapter = (await service.adapters.GetAdapter(get, metadata=ALICE)).adapter
    assert 'Accuracy' in [metric.name for metric in adapter.training_config.evaluation_metrics]


async def test_effective_parameter_groups_are_reported(service):
    """The adapter reports a group's learning rate and pattern; a pattern without matches is refused."""
    group = training_config_pb2.ParameterGroup(pattern='lora_B', learning_rate=0.016)
    optimizer = training_config_pb2.OptimizerConfig(learning_rate=0.001, groups=[group])
    config = training_config_pb2.TrainingConfig(optimizer=optimizer)
    adapter = await service.create(training_config=config)
    (group,) = adapter.training_config.optimizer.groups
    assert (group.pattern, group.learning_rate) == ('lora_B', 0.016)
    config.optimizer.groups[0].pattern = 'lora_C'
    verb = operation_pb2.Configure(training_config=config)
    failure = await failure_of(service.execute(adapter.adapter_id, 1, configure=verb))
    assert failure.code == 'INVALID_ARGUMENT'


async def test_step_reports_its_layers_on_request(service):
    """A step returns finite statistics of every adapted layer, but only on request."""
    adapter_id = (await service.create()).adapter_id
    await service.result(adapter_id, 1, forward_backward=forward_backward(BATCH))
    response = await service.result(
        adapter_id, 2, clip_grad_and_step=operation_pb2.ClipGradAndStep(max_grad_value=0.1, is_health_returned=True)
    )
    assert response.step.layers
    assert all(np.isfinite(layer.grad_norm) and not layer.non_finite_location for layer in response.step.layers)
    await service.result(adapter_id, 3, forward_backward=forward_backward(BATCH))
    assert not (await service.result(adapter_id, 4, step=operation_pb2.Step())).step.layers


async def test_undo_restores_the_weights_bitwise(service):
    """Undoing two steps restores the log-probabilities bitwise; undoing more steps is refused."""
    adapter_id = (await service.create()).adapter_id
    before = await logprobs_of(service, adapter_id, 1)
    for number in (2, 4):
        await service.result(adapter_id, number, forward_backward=forward_backward(BATCH))
        await service.result(adapter_id, number + 1, clip_grad_and_step=operation_pb2.ClipGradAndStep())
    assert await logprobs_of(service, adapter_id, 6) != before
    undone = await service.result(adapter_id, 7, undo=operation_pb2.Undo(step_count=2))
    assert undone.step.step_count == 0
    assert await logprobs_of(service, adapter_id, 8) == before
    failure = await failure_of(service.execute(adapter_id, 9, undo=operation_pb2.Undo(step_count=1)))
    assert failure.reason == 'UNDO_TOO_FAR'


async def test_watch_resumes_after_a_number(service):
    """A watch resumes after a sequence number; another tenant's watch is refused."""
    adapter_id = (await service.create()).adapter_id
    for number in range(1, 4):
        await service.result(adapter_id, number, zero_grad=operation_pb2.ZeroGrad())
    request = training_service_pb2.WatchOperationsRequest(adapter_id=adapter_id, after_sequence_number=1)
    watch = service.training.WatchOperations(request, metadata=ALICE)
    responses = aiter(watch)
    seen = [(await anext(responses)).result.sequence_number for _ in range(2)]
    following = asyncio.ensure_future(anext(responses))
    await service.result(adapter_id, 4, zero_grad=operation_pb2.ZeroGrad())
    assert [*seen, (await following).result.sequence_number] == [2, 3, 4]
    watch.cancel()
    foreign = await failure_of(service.training.WatchOperations(request, metadata=BOB))
    assert foreign.reason == 'ADAPTER_NOT_FOUND'


async def test_waiting_operation_is_reported_and_can_be_cancelled(service):
    """An operation whose predecessor is missing is queued; cancelling it frees its number."""
    adapter_id = (await service.create()).adapter_id
    waiting = asyncio.ensure_future(failure_of(service.execute(adapter_id, 2, zero_grad=operation_pb2.ZeroGrad())))
    record = training_service_pb2.GetOperationRequest(adapter_id=adapter_id, sequence_number=2)
    response = None
    while response is None:
        reported = await asyncio.gather(service.training.GetOperation(record, metadata=ALICE), return_exceptions=True)
        response = None if isinstance(reported[0], BaseException) else reported[0]
    assert (response.state, response.queue_position) == (training_service_pb2.OPERATION_STATE_QUEUED, 1)
    request = training_service_pb2.CancelOperationRequest(adapter_id=adapter_id, sequence_number=2)
    foreign = await failure_of(service.training.CancelOperation(request, metadata=BOB))
    assert foreign.reason == 'ADAPTER_NOT_FOUND'
    assert (await service.training.CancelOperation(request, metadata=ALICE)).is_cancelled
    assert (await waiting).code == 'CANCELLED'
    for number in (1, 2):
        await service.result(adapter_id, number, zero_grad=operation_pb2.ZeroGrad())
    assert not (await service.training.CancelOperation(request, metadata=ALICE)).is_cancelled


async def test_estimate_creates_no_adapter(service):
    """An estimate creates no adapter, and more tokens need more memory."""
    requests = [
        adapter_service_pb2.EstimateRequest(base_model=service.base_model, batch_size=2, sequence_tokens=tokens)
        for tokens in (16, 128)
    ]
    small, large = [await service.adapters.Estimate(request, metadata=ALICE) for request in requests]
    assert small.parameter_count == large.parameter_count > 0
    assert small.peak_bytes < large.peak_bytes
    assert small.does_fit
    listed = await service.adapters.ListAdapters(adapter_service_pb2.ListAdaptersRequest(), metadata=ALICE)
    assert list(listed.adapters) == []


async def test_the_adapters_of_a_session_are_listed_by_it(service):
    """Each adapter reports its session, and the list of a session contains only the session's adapters."""
    for index in range(3):
        session_id = 'ss-1' if index < 2 else 'ss-2'
        request = adapter_service_pb2.CreateAdapterRequest(
            request_id=f'r{index}', base_model=service.base_model, session_id=session_id
        )
        response = await service.adapters.CreateAdapter(request, metadata=ALICE)
        assert (response.adapter.session_id, response.adapter.is_parked) == (session_id, False)
    list_request = adapter_service_pb2.ListAdaptersRequest(session_id='ss-1', page_size=1)
    first = await service.adapters.ListAdapters(list_request, metadata=ALICE)
    list_request.page_token = first.next_page_token
    second = await service.adapters.ListAdapters(list_request, metadata=ALICE)
    assert [adapter.session_id for page in (first, second) for adapter in page.adapters] == ['ss-1', 'ss-1']
    assert not second.next_page_token
    list_request.session_id = 'ss-2'
    with pytest.raises(grpc.aio.AioRpcError):
        await service.adapters.ListAdapters(list_request, metadata=ALICE)


async def test_versions_of_a_deleted_adapter_leave_the_checkpoint_service(service):
    """A deleted adapter's versions are deleted with their folders; other adapters' versions are kept."""
    versions = version_service_pb2_grpc.VersionServiceStub(service.checkpoints.channel)
    adapter_ids = [(await service.create(request_id=name)).adapter_id for name in ('deleted', 'kept')]
    for adapter_id in adapter_ids:
        await service.result(adapter_id, 1, publish_version=operation_pb2.PublishVersion())
    await until(lambda: len(service.checkpoints.stored_folders()) == 2)
    request = adapter_service_pb2.DeleteAdapterRequest(adapter_id=adapter_ids[0])
    await service.adapters.DeleteAdapter(request, metadata=ALICE)
    deleted, kept = (version_service_pb2.GetVersionRequest(adapter_id=adapter_id) for adapter_id in adapter_ids)
    with acting_for(INTERNAL_ALICE):
        with suppress(grpc.aio.AioRpcError):
            while await versions.GetVersion(deleted):
                pass
        assert (await failure_of(versions.GetVersion(deleted))).code == 'NOT_FOUND'
        assert (await versions.GetVersion(kept)).version.version == 1
    assert [folder.split('/')[1] for folder in service.checkpoints.stored_folders()] == [adapter_ids[1]]
