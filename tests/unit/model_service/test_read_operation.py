"""Tests of reading operations whose batch is inline, uploaded or from a loader."""

import numpy as np
import pytest

from twinkle.api.data.v1 import input_feature_pb2
from twinkle.api.model.v1 import operation_pb2
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import InvalidField, NotBuiltYet, UploadNotFound
from twinkle_services.kit.rpc.tensors import tensor_to_proto
from twinkle_services.model.api.convert_operation import OperationReader, operation_from_proto
from twinkle_services.model.api.record_codec import ProtoRecordCodec
from twinkle_services.model.domain.loader_batch import BatchReference, LoadedBatch, LoaderCursor

ALICE, BOB = Caller(tenant_id='alice'), Caller(tenant_id='bob')
VOCABULARY = 50
REFERENCE = BatchReference(loader_id='ld', cursor=LoaderCursor(consumed_rows=2, state=b's'))


class UploadedBatches:
    """The uploads of alice."""

    def __init__(self, **uploads: bytes) -> None:
        self.uploads = uploads

    async def __call__(self, caller: Caller, upload_id: str) -> bytes:
        """Return an upload."""
        if caller is not ALICE or upload_id not in self.uploads:
            raise UploadNotFound(upload_id)
        return self.uploads[upload_id]


def features(length: int = 4, token: int = 3) -> input_feature_pb2.FeatureBatch:
    """Return a batch with one example of a repeated token."""
    ids = tensor_to_proto(np.full(length, token, np.int32))
    return input_feature_pb2.FeatureBatch(features=[input_feature_pb2.InputFeature(input_ids=ids, labels=ids)])


def operation(**source) -> operation_pb2.Operation:
    """Return forward_backward over a batch with this source."""
    batch = operation_pb2.Batch(**source)
    return operation_pb2.Operation(
        adapter_id='a', sequence_number=1, forward_backward=operation_pb2.ForwardBackward(batch=batch)
    )


@pytest.mark.parametrize('length', [4, 500_000])
async def test_uploaded_batch_is_the_inline_one(length):
    """An uploaded batch gives the same fingerprint, payload and examples as an inline batch."""
    content = features(length)
    read = OperationReader(UploadedBatches(up=content.SerializeToString()), vocabulary_size=VOCABULARY)
    uploaded = await read(ALICE, operation(upload_id='up'), 'operation')
    inline = operation_from_proto(operation(features=content), 'operation', vocabulary_size=VOCABULARY)
    assert (uploaded.fingerprint, uploaded.payload) == (inline.fingerprint, inline.payload)
    np.testing.assert_array_equal(uploaded.verb.features[0]['input_ids'], inline.verb.features[0]['input_ids'])


async def test_upload_of_another_tenant_is_not_found():
    """Another tenant's upload is not found."""
    read = OperationReader(UploadedBatches(up=features().SerializeToString()), vocabulary_size=VOCABULARY)
    with pytest.raises(UploadNotFound):
        await read(BOB, operation(upload_id='up'), 'operation')


@pytest.mark.parametrize(
    ('source', 'field'),
    [
        ({'upload_id': ''}, 'batch.upload_id'),
        ({'upload_id': 'garbage'}, 'batch.upload_id'),
        ({'upload_id': 'hostile'}, 'batch.features.features[0].input_ids'),
        ({}, 'batch.source'),
        ({'loader': {'loader_id': ''}}, 'batch.loader.loader_id'),
        ({'loader': {'loader_id': 'ld', 'cursor': {'consumed_rows': -1}}}, 'batch.loader.cursor.consumed_rows'),
        ({'loader': {'loader_id': 'ld', 'loaded': {}}}, 'batch.loader.loaded'),
    ],
)
async def test_invalid_uploaded_batch_is_named(source, field):
    """A batch with an invalid source or invalid content is refused with the path of the field."""
    uploads = UploadedBatches(garbage=b'\xff' * 9, hostile=features(token=VOCABULARY).SerializeToString())
    with pytest.raises(InvalidField) as refusal:
        await OperationReader(uploads, vocabulary_size=VOCABULARY)(ALICE, operation(**source), 'operation')
    assert refusal.value.field == f'operation.forward_backward.{field}'


async def test_batches_of_the_sampler_are_refused():
    """Batches from the sampler are refused as not supported yet."""
    read = OperationReader(UploadedBatches(), vocabulary_size=VOCABULARY)
    with pytest.raises(NotBuiltYet):
        await read(ALICE, operation(samples={'sequence_ids': ['x']}), 'operation')


async def test_batch_of_a_loader_is_fetched_later():
    """An operation refers to its loader's batch, and keeps its fingerprint when the batch is added."""
    read, codec = (
        OperationReader(UploadedBatches(), vocabulary_size=VOCABULARY),
        ProtoRecordCodec(vocabulary_size=VOCABULARY),
    )
    handle = {'loader_id': 'ld', 'cursor': {'consumed_rows': 2, 'state': b's'}}
    converted = await read(ALICE, operation(loader=handle), 'operation')
    assert (converted.batch_reference, converted.is_batch_missing) == (REFERENCE, True)
    loaded = LoadedBatch(content=features().SerializeToString(), next_cursor=LoaderCursor(consumed_rows=3))
    filled = codec.with_batch(converted, loaded)
    np.testing.assert_array_equal(filled.verb.features[0]['input_ids'], [3] * 4)
    restored = codec.operation_from_bytes(filled.payload)
    for item in (filled, restored):
        assert (item.fingerprint, item.batch_reference, item.next_cursor) == (
            converted.fingerprint,
            REFERENCE,
            loaded.next_cursor,
        )
    assert restored.payload == filled.payload != converted.payload


async def test_tokens_of_a_loader_are_checked_like_inline_ones():
    """Token ids of a loader's batch are validated like inline token ids."""
    read, codec = (
        OperationReader(UploadedBatches(), vocabulary_size=VOCABULARY),
        ProtoRecordCodec(vocabulary_size=VOCABULARY),
    )
    converted = await read(ALICE, operation(loader={'loader_id': 'ld'}), 'operation')
    content = features(token=VOCABULARY).SerializeToString()
    with pytest.raises(InvalidField) as refusal:
        codec.with_batch(converted, LoadedBatch(content=content, next_cursor=LoaderCursor(consumed_rows=1)))
    field = 'operation.forward_backward.batch.loader.loaded.features.features[0].input_ids'
    assert refusal.value.field == field


def many(count: int) -> input_feature_pb2.FeatureBatch:
    """Return a batch of examples that would be refused for another reason if they were checked."""
    return input_feature_pb2.FeatureBatch(features=[input_feature_pb2.InputFeature()] * count)


@pytest.mark.parametrize(
    ('source', 'field'), [({'features': many(3)}, 'batch.features.features'), ({'upload_id': 'up'}, 'batch.upload_id')]
)
async def test_too_many_examples_are_refused_before_any_is_checked(source, field):
    """A batch with too many examples is refused with the path of its source, whether it is inline or uploaded."""
    uploads = UploadedBatches(up=many(3).SerializeToString())
    read = OperationReader(uploads, vocabulary_size=VOCABULARY, max_batch_examples=2)
    with pytest.raises(InvalidField) as refusal:
        await read(ALICE, operation(**source), 'operation')
    assert refusal.value.field == f'operation.forward_backward.{field}'


async def test_too_many_examples_of_a_loader_are_refused_before_any_is_checked():
    """A fetched batch with too many examples is refused; a stored batch can be read without this limit."""
    read, codec = (
        OperationReader(UploadedBatches(), vocabulary_size=VOCABULARY),
        ProtoRecordCodec(vocabulary_size=VOCABULARY, max_batch_examples=2),
    )
    converted = await read(ALICE, operation(loader={'loader_id': 'ld'}), 'operation')
    cursor = LoaderCursor(consumed_rows=1)
    with pytest.raises(InvalidField) as refusal:
        codec.with_batch(converted, LoadedBatch(content=many(3).SerializeToString(), next_cursor=cursor))
    assert refusal.value.field == 'operation.forward_backward.batch.loader.loaded.features.features'
    valid = input_feature_pb2.FeatureBatch(features=[features().features[0]] * 3)
    stored = ProtoRecordCodec(vocabulary_size=VOCABULARY).with_batch(
        converted, LoadedBatch(content=valid.SerializeToString(), next_cursor=cursor)
    )
    assert len(codec.operation_from_bytes(stored.payload).verb.features) == 3


async def test_operation_without_a_verb_is_refused():
    """An operation without a verb is refused."""
    read = OperationReader(UploadedBatches(), vocabulary_size=VOCABULARY)
    with pytest.raises(InvalidField):
        await read(ALICE, operation_pb2.Operation(adapter_id='a', sequence_number=1), 'operation')
