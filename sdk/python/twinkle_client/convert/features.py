"""Conversion of tokenized examples."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinkle.api.data.v1 import input_feature_pb2 as pb
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import EXTRA_STREAMS, IGNORE_INDEX, InputFeature, StreamSpec
from twinkle_client.convert.tensors import expert_indices, matrix, tensor_from_proto, tensor_to_proto, vector

_INTEGERS = ('position_ids', 'labels', 'completion_mask')
_FLOATS = ('loss_weights', 'advantages', 'old_logps', 'ref_logps')
_EXPERTS = 'routed_experts'
_EXTRA_FLOATS = tuple(name for name, spec in EXTRA_STREAMS.items() if spec.kind == 'float' and not spec.is_wide)
PER_LABEL = (*_FLOATS, *_EXTRA_FLOATS)
"""Fields that can be passed separately from the features, one entry per feature."""
_CLIENT_ONLY = frozenset(
    {'messages', 'tools', 'user_data', 'samples', 'length', 'attention_mask', 'prompt', 'images', 'videos', 'audios'}
)
"""Keys of a feature that are not sent."""
_MEDIA = (
    'pixel_values', 'image_grid_thw', 'pixel_values_videos', 'video_grid_thw', 'second_per_grid_ts', 'input_features'
)  # fmt: skip
"""Keys that models read, but that the contract does not support yet."""


def features_to_proto(
    features: Sequence[Mapping[str, Any]], *, per_label: Mapping[str, Sequence[Any] | None] | None = None
) -> pb.FeatureBatch:
    """Return the message of a batch of examples.

    Args:
        features: `InputFeature`s; padding (attention mask 0) is removed.
        per_label: Fields of `PER_LABEL` by name, with one entry per feature: a number for all its labels, one
            number per label that is not ignored, one number per token, or a sampler's `logprobs`.

    Raises:
        ValueError: A field cannot be sent; the message names the feature and the field.
    """
    if not features:
        raise ValueError('features: at least one feature is required')
    given = {name: values for name, values in (per_label or {}).items() if values is not None}
    for name, values in given.items():
        if name not in PER_LABEL:
            raise ValueError(f'{name} is not one of {", ".join(PER_LABEL)}')
        if len(values) != len(features):
            raise ValueError(f'{name}: {len(values)} entries for {len(features)} features')
    return pb.FeatureBatch(
        features=[
            _feature_to_proto(feature, {name: values[index] for name, values in given.items()}, f'features[{index}]')
            for index, feature in enumerate(features)
        ]
    )


def _feature_to_proto(feature: Mapping[str, Any], per_label: Mapping[str, Any], field: str) -> pb.InputFeature:
    if not isinstance(cast(Any, feature), Mapping):
        raise ValueError(f'{field} must be a mapping with input_ids and labels, got {feature!r:.40}')
    if feature.get('input_ids') is None:
        raise ValueError(f'{field}.input_ids is missing')
    for name in _MEDIA:
        if feature.get(name) is not None:
            raise ValueError(
                f'{field}.{name}: services do not support images, videos and audio yet; train in process instead'
            )
    tokens = vector(feature['input_ids'], np.int32, field=f'{field}.input_ids')
    is_kept = _kept(feature, len(tokens), field)
    tensors = {'input_ids': tensor_to_proto(tokens[is_kept])}
    for name in (*_INTEGERS, *_FLOATS):
        if feature.get(name) is not None:
            array = vector(feature[name], np.float32 if name in _FLOATS else np.int32, field=f'{field}.{name}')
            _check_length(array, len(tokens), f'{field}.{name}')
            tensors[name] = tensor_to_proto(array[is_kept])
    if feature.get(_EXPERTS) is not None:
        experts = expert_indices(feature[_EXPERTS], field=f'{field}.{_EXPERTS}')
        if len(experts) > len(tokens):
            raise ValueError(f'{field}.{_EXPERTS} has {len(experts)} rows, but input_ids has {len(tokens)} elements')
        # Experts may be given for the first tokens only, and all of these may be masked.
        kept = experts[is_kept[: len(experts)]]
        tensors |= {_EXPERTS: tensor_to_proto(kept)} if len(kept) else {}
    extra = _extra_tensors(feature, is_kept, field)
    for name, value in per_label.items():
        labels = tensors.get('labels')
        if labels is None:
            raise ValueError(f'{field}.labels is missing; {name} requires it')
        array = _per_label(value, tensor_from_proto(labels), f'{name} of {field}')
        (extra if name in EXTRA_STREAMS else tensors)[name] = tensor_to_proto(array)
    return pb.InputFeature(**tensors, extra_tensors=extra)


def _kept(feature: Mapping[str, Any], length: int, field: str) -> npt.NDArray[np.bool_]:
    if feature.get('attention_mask') is None:
        return np.ones(length, dtype=np.bool_)
    mask = vector(feature['attention_mask'], np.int32, field=f'{field}.attention_mask')
    _check_length(mask, length, f'{field}.attention_mask')
    return mask != 0


def _check_length(array: npt.NDArray[Any], length: int, field: str) -> None:
    if len(array) != length:
        raise ValueError(f'{field} has {len(array)} elements, but input_ids has {length}')


def _per_label(value: Any, labels: npt.NDArray[Any], field: str) -> npt.NDArray[np.float32]:
    """Expand a number or numbers per label to one number per token, 0 where the label is ignored.

    Numbers per token are returned unchanged.
    """
    positions = np.flatnonzero(labels != IGNORE_INDEX)
    numbers = np.asarray(_numbers(value), dtype=np.float32)
    if numbers.ndim == 1 and len(numbers) == len(labels):
        return numbers
    if numbers.ndim == 1 and len(numbers) != len(positions):
        raise ValueError(f'{field}: {len(numbers)} numbers for {len(positions)} labels and {len(labels)} tokens')
    result = np.zeros(len(labels), dtype=np.float32)
    result[positions] = numbers
    return result


def _numbers(value: Any) -> Any:
    """Extract the numbers from a sampler's log-probabilities; return other values unchanged."""
    if isinstance(value, Sequence) and value and isinstance(value[0], Sequence):
        # Each token has a list of (token id, log-probability), with the sampled token first.
        return [float(candidates[0][1]) for candidates in cast(Any, value)]
    return cast(Any, value)


def _extra_tensors(
    feature: Mapping[str, Any], is_kept: npt.NDArray[np.bool_], field: str
) -> dict[str, tensor_pb2.Tensor]:
    unknown = sorted(set(feature) - {'input_ids', _EXPERTS, *_INTEGERS, *_FLOATS, *_CLIENT_ONLY, *EXTRA_STREAMS})
    if unknown:
        known = ', '.join((*_INTEGERS, *_FLOATS, _EXPERTS, *EXTRA_STREAMS))
        raise ValueError(f'{field}.{unknown[0]} is not read by any loss; known fields are {known}')
    return {
        name: tensor_to_proto(_extra(feature[name], spec, is_kept, f'{field}.{name}'))
        for name, spec in EXTRA_STREAMS.items()
        if feature.get(name) is not None
    }


def _extra(value: Any, spec: StreamSpec, is_kept: npt.NDArray[np.bool_], field: str) -> npt.NDArray[Any]:
    array = (matrix if spec.is_wide else vector)(value, np.int32 if spec.kind == 'id' else np.float32, field=field)
    _check_length(array, len(is_kept), field)
    return array[is_kept]


def feature_from_proto(feature: pb.InputFeature) -> InputFeature:
    """Return the example of a message, with read-only arrays."""
    result: dict[str, Any] = {'input_ids': tensor_from_proto(feature.input_ids)}
    for name in (*_INTEGERS, *_FLOATS, _EXPERTS):
        if feature.HasField(cast(Any, name)):
            result[name] = tensor_from_proto(getattr(feature, name))
    result.update({name: tensor_from_proto(tensor) for name, tensor in feature.extra_tensors.items()})
    result['length'] = len(result['input_ids'])
    return cast(InputFeature, result)
