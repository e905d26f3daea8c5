"""Examples as the trainer takes them: every check that can be made before they are queued is made here."""

from collections.abc import Collection, Sequence

import numpy as np

from services.gateway.tinker.arrays import Array
from services.gateway.tinker.datums import Datum
from services.gateway.tinker.losses import BOUNDS, LossRule
from services.kit.errors import InvalidField
from services.kit.rpc.tensors import tensor_to_proto
from twinkle.api.data.v1 import input_feature_pb2

_FIELDS = {'weights': 'loss_weights', 'logprobs': 'old_logps', 'advantages': 'advantages'}
"""Inputs that have a field of their own; the others keep their names."""


class FeatureReader:
    """Makes features of examples for one loss and one base model."""

    def __init__(
        self, rule: LossRule, *, options: Collection[str] = (), vocabulary_size: int, context_tokens: int
    ) -> None:
        """Check against these bounds, 0 is none; `options` are those that the loss is given."""
        self._rule = rule
        self._required = {'target_tokens', *rule.required, *(rule.either - set(options))}
        self._vocabulary_size = vocabulary_size or 1 << 31
        self._context_tokens = context_tokens or 1 << 31

    def read(self, datum: Datum, field: str) -> input_feature_pb2.InputFeature:
        """Return a feature.

        Raises:
            InvalidField: an input is missing, unknown, of a wrong shape or out of its range.
        """
        length = len(datum.tokens)
        if not 1 <= length <= self._context_tokens:
            problem = f'must have 1 to {self._context_tokens} tokens, as many as the context has; got {length}'
            raise InvalidField(f'{field}.model_input', problem)
        self._check_ids(datum.tokens, f'{field}.model_input')
        inputs = f'{field}.loss_fn_inputs'
        self._check_names(datum, inputs)
        targets = datum.inputs['target_tokens']
        self._check_targets(targets, length, f'{inputs}.target_tokens')
        feature = input_feature_pb2.InputFeature(input_ids=tensor_to_proto(datum.tokens.astype('<i4')))
        if targets.ndim == 2:
            _set_candidates(feature, targets, self._weights(datum, inputs))
            return feature
        feature.labels.CopyFrom(tensor_to_proto(targets.astype('<i4')))
        for name, array in datum.inputs.items():
            if name != 'target_tokens':
                _set(feature, name, _numbers(_spread(name, array, length), (length,), f'{inputs}.{name}'))
        return feature

    def _check_names(self, datum: Datum, field: str) -> None:
        known = {'target_tokens', *self._rule.required, *self._rule.optional}
        if unknown := sorted(set(datum.inputs) - known):
            problem = f'is not read by this loss, which takes {", ".join(sorted(known))}'
            raise InvalidField(f'{field}.{unknown[0][:100]}', problem)
        if missing := sorted(self._required - set(datum.inputs)):
            raise InvalidField(f'{field}.{missing[0]}', 'is required by this loss')

    def _check_targets(self, targets: Array, length: int, field: str) -> None:
        if targets.dtype.kind != 'i':
            raise InvalidField(field, 'must be int64')
        if targets.ndim not in {1, 2} or len(targets) != length or targets.size == 0:
            problem = f'must have a row for each of the {length} tokens of model_input, got the shape {targets.shape}'
            raise InvalidField(field, problem)
        self._check_ids(targets, field)

    def _check_ids(self, ids: Array, field: str) -> None:
        if ids.min() < 0 or ids.max() >= self._vocabulary_size:
            raise InvalidField(field, f'token ids must be at least 0 and below {self._vocabulary_size}')

    def _weights(self, datum: Datum, field: str) -> Array:
        shape = datum.inputs['target_tokens'].shape
        return _numbers(datum.inputs.get('weights', np.ones(shape, '<f4')), shape, f'{field}.weights')


def features_of(datums: Sequence[Datum], reader: FeatureReader) -> input_feature_pb2.FeatureBatch:
    """Return the batch of all examples.

    Raises:
        InvalidField: there is none, one is wrong, or some have one target a place and others several.
    """
    if not datums:
        raise InvalidField('data', 'must have at least one datum')
    features = [reader.read(datum, f'data[{index}]') for index, datum in enumerate(datums)]
    widths = {datum.inputs['target_tokens'].ndim for datum in datums}
    if len(widths) > 1:
        raise InvalidField('data', 'target_tokens must have one dimension in all datums, or two in all')
    names = set(datums[0].inputs)
    for index, datum in enumerate(datums):
        if odd := sorted(names ^ set(datum.inputs)):
            raise InvalidField(f'data[{index}].loss_fn_inputs.{odd[0][:100]}', 'must be in all datums or in none')
    return input_feature_pb2.FeatureBatch(features=features)


def _spread(name: str, array: Array, length: int) -> Array:
    """Return a bound of a datum for each of its places, where there is one for all."""
    return np.full(length, array.reshape(-1)[0]) if name in BOUNDS and array.size == 1 else array


def _numbers(array: Array, shape: tuple[int, ...], field: str) -> Array:
    if array.shape != shape:
        raise InvalidField(field, f'must have the shape {list(shape)} of target_tokens, got {list(array.shape)}')
    numbers = array.astype('<f4')
    if not np.isfinite(numbers).all():
        raise InvalidField(field, 'must be finite everywhere')
    return numbers


def _set(feature: input_feature_pb2.InputFeature, name: str, array: Array) -> None:
    tensor = tensor_to_proto(array)
    if name in _FIELDS:
        getattr(feature, _FIELDS[name]).CopyFrom(tensor)
    else:
        feature.extra_tensors[name].CopyFrom(tensor)


def _set_candidates(feature: input_feature_pb2.InputFeature, targets: Array, weights: Array) -> None:
    """Several tokens a place: the label only says that the place counts."""
    feature.labels.CopyFrom(tensor_to_proto(targets[:, 0].astype('<i4')))
    feature.extra_tensors['target_ids'].CopyFrom(tensor_to_proto(targets))
    feature.extra_tensors['target_weights'].CopyFrom(tensor_to_proto(weights))
