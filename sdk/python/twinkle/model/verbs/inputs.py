"""Arguments of forward methods other than the examples: options, and numbers for the labels."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinkle.data_format import IGNORE_INDEX, STREAMS, InputFeature
from twinkle.loss import Loss, build_loss
from twinkle.model.engine import ForwardOptions
from twinkle.model.errors import InvalidArgument

PER_LABEL = ('loss_weights', *(name for name, spec in STREAMS.items() if not spec.is_wide))
"""Streams that may be given as arguments, one entry per example."""
WIDE = tuple(name for name, spec in STREAMS.items() if spec.is_wide)
"""Streams with several columns, one array [T, K] per example."""
_OPTIONS = ('temperature', 'disable_lora', 'return_logits', 'return_routed_experts', 'task', 'micro_batch_size')
"""Options of forward methods that are not streams."""
_TASKS = ('causal_lm', 'embedding')


def own_loss(given: dict[str, Any]) -> Loss | None:
    """Remove `loss` and `loss_options` from the options of a forward method; return the built loss, or None.

    Raises:
        InvalidArgument: there are options of a loss, but no loss.
        UnknownComponent, InvalidComponentOptions, PluginRefused, HubError: see `twinkle.loss.build_loss`.
    """
    loss, options = given.pop('loss', None), given.pop('loss_options', None) or {}
    if loss is None and options:
        raise InvalidArgument('loss_options require `loss`, which is not given')
    return None if loss is None else build_loss(loss, **options)


def forward_options(given: Mapping[str, Any], *, learns_values: bool) -> ForwardOptions:
    """Return the options of a forward method.

    Args:
        given: `temperature`, `disable_lora`, `return_logits`, `return_routed_experts`, `task` ('causal_lm' or
            'embedding') and `micro_batch_size`, the maximum number of examples in one pass.
        learns_values: whether the adapter has a value head, whose values are then returned.

    Raises:
        InvalidArgument: an option or the task is unknown, or an option is out of range.
    """
    unknown = sorted(set(given) - {*_OPTIONS, *PER_LABEL, *WIDE})
    if unknown:
        raise InvalidArgument(f'unknown options {unknown}; use {sorted({*_OPTIONS, *PER_LABEL, *WIDE})}')
    task = given.get('task', 'causal_lm')
    if task not in _TASKS:
        raise InvalidArgument(f'task must be one of {_TASKS}, got {task!r}')
    requested = {
        'logits': given.get('return_logits', False),
        'embeddings': task == 'embedding',
        'routed_experts': given.get('return_routed_experts', False),
        'values': learns_values,
    }
    return ForwardOptions(
        temperature=given.get('temperature', 1.0),
        is_adapter_disabled=given.get('disable_lora', False),
        more_outputs=tuple(name for name, is_requested in requested.items() if is_requested),
        micro_batch_size=given.get('micro_batch_size'),
    )


def with_streams(features: Sequence[InputFeature], given: Mapping[str, Any]) -> list[InputFeature]:
    """Return copies of features with the streams that were given as arguments.

    Args:
        features: features; not modified.
        given: for names in `PER_LABEL` one entry per feature: a number for all its labels, one number per label, or
            one per token; `logprobs` of a sampler are accepted. For names in `WIDE` an array [T, K] per feature.

    Raises:
        InvalidArgument: the arguments do not match the features.
    """
    streams = {name: given[name] for name in (*PER_LABEL, *WIDE) if given.get(name) is not None}
    for name, values in streams.items():
        if len(values) != len(features):
            raise InvalidArgument(f'{name}: {len(values)} entries for {len(features)} features')
    merged: list[InputFeature] = []
    for index, feature in enumerate(features):
        own = {name: _fitted(name, values[index], feature, index) for name, values in streams.items()}
        merged.append(cast(InputFeature, {**feature, **own}))
    return merged


def with_labels(features: Sequence[InputFeature]) -> list[InputFeature]:
    """Return copies of the features; features without labels receive labels that are all ignored."""
    return [
        cast(InputFeature, {'labels': np.full(len(feature['input_ids']), IGNORE_INDEX), **feature})
        for feature in features
    ]


def _fitted(name: str, value: Any, feature: InputFeature, index: int) -> npt.NDArray[Any]:
    if name in WIDE:
        return np.asarray(value)
    labels = np.asarray(feature.get('labels', ()))
    positions = np.flatnonzero(labels != IGNORE_INDEX)
    numbers = np.asarray(_numbers(value), np.float32)
    if numbers.ndim == 1 and len(numbers) == len(labels):
        return numbers
    if numbers.ndim > 1 or (numbers.ndim == 1 and len(numbers) != len(positions)):
        raise InvalidArgument(
            f'{name}[{index}] must be a number, {len(positions)} numbers (one per label) '
            f'or {len(labels)} (one per token)'
        )
    fitted = np.zeros(len(labels), np.float32)
    fitted[positions] = numbers
    return fitted


def _numbers(value: Any) -> Any:
    """Return a sampler's log-probabilities as plain numbers; other values are returned unchanged."""
    if isinstance(value, Sequence) and value and isinstance(value[0], Sequence):
        # A sampler returns a list of (token id, log-probability) per token, the sampled token first.
        return [float(candidates[0][1]) for candidates in value]
    return value
