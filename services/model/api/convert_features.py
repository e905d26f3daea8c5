"""Converts the examples of a batch."""

from collections.abc import Sized

import numpy as np

from twinkle.api.data.v1 import dataset_pb2, input_feature_pb2
from twinkle.api.model.v1 import operation_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import EXTRA_STREAMS, IGNORE_INDEX, InputFeature, StreamSpec
from twinkle_services.kit.errors import InvalidField, NotBuiltYet
from twinkle_services.kit.rpc.fields import id_from_proto, not_negative
from twinkle_services.kit.rpc.tensors import tensor_from_proto
from twinkle_services.model.domain.loader_batch import BatchReference, LoaderCursor

_INTEGERS = ('int32', 'int64')
_FLOATS = ('float32',)
_PER_TOKEN: dict[str, tuple[str, ...]] = {
    'position_ids': _INTEGERS,
    'loss_weights': _FLOATS,
    'advantages': _FLOATS,
    'old_logps': _FLOATS,
    'ref_logps': _FLOATS,
    'completion_mask': _INTEGERS,
}
"""Allowed dtypes of the per-token fields other than `input_ids` and `labels`."""


def features_from_proto(batch: operation_pb2.Batch, field: str, *, vocabulary_size: int) -> list[InputFeature]:
    """Convert the examples of a batch. The list is empty if the examples must still be fetched from a loader.

    Args:
        batch: The message.
        field: Field path of the message, for errors.
        vocabulary_size: Upper bound of token ids and labels, exclusive.

    Raises:
        InvalidField: An example is malformed; the path names the example and the field.
        NotBuiltYet: The source of the batch is not supported.
    """
    source = batch.WhichOneof('source')
    if source is None:
        raise InvalidField(f'{field}.source', 'must be set: give features, an upload_id or a loader')
    if source == 'features':
        return _features(batch.features, f'{field}.features.features', vocabulary_size)
    if source != 'loader':
        raise NotBuiltYet(f'a batch by {source}')
    if not batch.loader.HasField('loaded'):
        return []
    return _features(batch.loader.loaded.features, f'{field}.loader.loaded.features.features', vocabulary_size)


def batch_reference_from_proto(batch: operation_pb2.Batch, field: str) -> BatchReference | None:
    """Return the reference to a loader's batch; None for other batches.

    Raises:
        InvalidField: The loader's id or the cursor is malformed.
    """
    if batch.WhichOneof('source') != 'loader':
        return None
    loader_id = id_from_proto(batch.loader.loader_id, f'{field}.loader.loader_id')
    if not batch.loader.HasField('cursor'):
        return BatchReference(loader_id=loader_id)
    cursor = batch.loader.cursor
    not_negative(cursor.consumed_rows, f'{field}.loader.cursor.consumed_rows')
    return BatchReference(loader_id=loader_id, cursor=cursor_from_proto(cursor))


def cursor_from_proto(cursor: dataset_pb2.Cursor) -> LoaderCursor:
    return LoaderCursor(consumed_rows=cursor.consumed_rows, state=cursor.state)


def check_example_count(examples: Sized, field: str, *, limit: int) -> None:
    """Refuse a batch with too many examples before the examples are checked.

    Raises:
        InvalidField: There are more than `limit` examples.
    """
    if len(examples) > limit:
        raise InvalidField(field, f'must have at most {limit} examples, got {len(examples)}; send several batches')


def _features(batch: input_feature_pb2.FeatureBatch, field: str, vocabulary_size: int) -> list[InputFeature]:
    if not batch.features:
        raise InvalidField(field, 'must have at least one example')
    return [_feature(message, f'{field}[{index}]', vocabulary_size) for index, message in enumerate(batch.features)]


def gradients_from_proto(tensors: list[tensor_pb2.Tensor], field: str) -> list[np.ndarray]:
    """Convert gradients of log-probabilities, float32 [T] each.

    Raises:
        InvalidField: A tensor is malformed.
    """
    return [
        tensor_from_proto(tensor, f'{field}[{index}]', dtypes=_FLOATS, dimensions=1)
        for index, tensor in enumerate(tensors)
    ]


def _feature(message: input_feature_pb2.InputFeature, field: str, vocabulary_size: int) -> InputFeature:
    for name in ('input_ids', 'labels'):
        if not message.HasField(name):
            raise InvalidField(f'{field}.{name}', 'must be set')
    ids = tensor_from_proto(message.input_ids, f'{field}.input_ids', dtypes=_INTEGERS, dimensions=1)
    if not len(ids):
        raise InvalidField(f'{field}.input_ids', 'must have at least one token')
    _check_range(ids, f'{field}.input_ids', vocabulary_size)
    labels = _per_token(message.labels, f'{field}.labels', _INTEGERS, len(ids))
    _check_range(labels[labels != IGNORE_INDEX], f'{field}.labels', vocabulary_size)
    feature = InputFeature(input_ids=ids, labels=labels, length=len(ids))
    present = {descriptor.name: tensor for descriptor, tensor in message.ListFields()}
    for name, dtypes in _PER_TOKEN.items():
        if name in present:
            feature[name] = _per_token(present[name], f'{field}.{name}', dtypes, len(ids))
    if 'routed_experts' in present:
        # The engine checks the shape and the values, which depend on the base model.
        feature['routed_experts'] = tensor_from_proto(
            message.routed_experts, f'{field}.routed_experts', dtypes=('uint8', *_INTEGERS), dimensions=3
        )
    for name, tensor in sorted(message.extra_tensors.items()):
        feature[name] = _extra_tensor(name, tensor, f'{field}.extra_tensors', len(ids), vocabulary_size)
    return feature


def _per_token(tensor: tensor_pb2.Tensor, field: str, dtypes: tuple[str, ...], length: int) -> np.ndarray:
    array = tensor_from_proto(tensor, field, dtypes=dtypes, dimensions=1)
    if len(array) != length:
        raise InvalidField(f'{field}.shape', f'must be as long as input_ids ({length}), got {len(array)}')
    return array


def _extra_tensor(name: str, tensor: tensor_pb2.Tensor, field: str, length: int, vocabulary_size: int) -> np.ndarray:
    spec = EXTRA_STREAMS.get(name)
    if spec is None:
        known = ', '.join(sorted(EXTRA_STREAMS))
        raise InvalidField(f'{field}[{name!r}]', f'is not read by any loss; known names are {known}')
    return _extra_array(spec, tensor, f'{field}[{name!r}]', length, vocabulary_size)


def _extra_array(
    spec: StreamSpec, tensor: tensor_pb2.Tensor, field: str, length: int, vocabulary_size: int
) -> np.ndarray:
    is_id = spec.kind == 'id'
    array = tensor_from_proto(
        tensor, field, dtypes=_INTEGERS if is_id else _FLOATS, dimensions=2 if spec.is_wide else 1
    )
    if len(array) != length:
        raise InvalidField(f'{field}.shape', f'must have as many rows as input_ids ({length}), got {len(array)}')
    if spec.is_wide and not array.shape[1]:
        raise InvalidField(f'{field}.shape', 'must have at least one column')
    if is_id:
        _check_range(array, field, vocabulary_size)
    return array


def _check_range(ids: np.ndarray, field: str, vocabulary_size: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocabulary_size):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise InvalidField(field, f'must be at least 0 and less than {vocabulary_size}, got {wrong}')
