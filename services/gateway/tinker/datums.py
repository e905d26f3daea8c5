"""Converts examples and losses of training requests, and prompts of sampling requests, to native messages.

All checks that do not need the model service are made here, before the request is queued. Functions raise InvalidField
with the path of the first wrong field.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from twinkle.api.data.v1 import input_feature_pb2
from twinkle.api.model.v1 import training_config_pb2
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.data_format.prompt_probe import MAX_TARGET_ELEMENTS, NO_TARGET, InvalidProbe, PromptProbe
from twinkle_services.gateway.http.validation import MAX_TOKEN_ID, read_model
from twinkle_services.gateway.tinker.arrays import Array, ElementBudget, TokenArray, array_from_json, array_from_proto
from twinkle_services.gateway.tinker.bodies import TinkerModel
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.tensors import tensor_to_proto

TEXT_ONLY = 'must be encoded_text: images and audio are not supported'
MAX_PARTS = 1 << 16
"""Maximum number of examples of a protobuf body, and of chunks of an example; two bytes can encode one of them."""
TARGETS, DRAW_COUNT = 'target_prompt_logprobs', 'prompt_alt_tokens_k'
"""Fields of a sampling request: tokens to score and number of tokens to draw at prompt positions after the first."""
MAX_INPUTS = 64
"""Maximum number of inputs of a loss."""
_NATIVE_NAMES = {'weights': 'loss_weights', 'logprobs': 'old_logps', 'advantages': 'advantages'}
"""Fields of InputFeature by input name; other inputs become extra tensors."""


@dataclass(frozen=True)
class LossRule:
    """Inputs and options of a loss."""

    required: frozenset[str]
    """Inputs of each datum in addition to target_tokens."""
    optional: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    """Names of numeric options in loss_fn_config."""


_POLICY = frozenset({'logprobs', 'advantages'})
BOUNDS = frozenset({'clip_low_threshold', 'clip_high_threshold'})
"""Bounds of the policy ratio: options for all datums, or inputs with a number for each datum or position."""
_RULES: Mapping[str, LossRule] = {
    'cross_entropy': LossRule(frozenset(), frozenset({'weights'})),
    'importance_sampling': LossRule(_POLICY),
    'ppo': LossRule(_POLICY, BOUNDS, BOUNDS),
    'cispo': LossRule(_POLICY, BOUNDS, BOUNDS),
    'dro': LossRule(_POLICY, options=frozenset({'beta'})),
    'gspo': LossRule(_POLICY | {'sequence_ratio_mask'}, BOUNDS, BOUNDS),
    'stable_reinforce': LossRule(frozenset({'advantages'}), frozenset({'logprobs'}), frozenset({'kl_coeff'})),
}
_MAX_OPTION = 1e6
LOSSES = tuple(_RULES)
"""Names of the supported losses."""


def rule_of(loss_fn: str) -> LossRule:
    if loss_fn == 'custom':
        problem = 'custom losses are not run by this server; forward_backward_custom computes them in the client'
        raise InvalidField('loss_fn', problem)
    if loss_fn not in _RULES:
        raise InvalidField('loss_fn', f'must be one of {", ".join(_RULES)}')
    return _RULES[loss_fn]


def loss_config(loss_fn: str, config: Mapping[str, float | str], *, is_wide: bool) -> training_config_pb2.LossConfig:
    """Return the native loss of one batch; `is_wide` states whether each position has several targets."""
    rule = rule_of(loss_fn)
    for name, value in config.items():
        field = f'loss_fn_config.{name[:100]}'
        if name not in rule.options:
            known = ', '.join(sorted(rule.options)) or 'no options'
            raise InvalidField(field, f'is not an option of {loss_fn}, which takes {known}')
        if isinstance(value, str) or not 0 <= value <= _MAX_OPTION:
            raise InvalidField(field, f'must be a number from 0 to {_MAX_OPTION:g}')
    low, high = config.get('clip_low_threshold', 0), config.get('clip_high_threshold', _MAX_OPTION)
    if float(low) > float(high):
        raise InvalidField('loss_fn_config.clip_low_threshold', 'must not be above clip_high_threshold')
    if is_wide and loss_fn != 'cross_entropy':
        raise InvalidField('data[0].loss_fn_inputs.target_tokens', f'{loss_fn} takes one target for each position')
    return training_config_pb2.LossConfig(name=loss_fn, options=struct_of(config))


@dataclass(frozen=True)
class Datum:
    """One training example."""

    tokens: Array
    """Complete input: int64 [N], where N is the number of tokens."""
    inputs: dict[str, Array]
    """Inputs of the loss, by name."""


class Chunk(TinkerModel):
    """Part of a prompt in JSON."""

    type: str = 'encoded_text'
    tokens: TokenArray | None = None


class ModelInput(TinkerModel):
    """Prompt in JSON."""

    chunks: Annotated[list[Chunk], Field(fail_fast=True)]


class DatumBody(TinkerModel):
    """Example in JSON."""

    loss_fn_inputs: dict[str, Any]
    """JSON tensors, validated when they are converted."""
    model_input: ModelInput


def datum_from_proto(message: wire.Datum, field: str, budget: ElementBudget) -> Datum:
    check_count(message.model_input, MAX_PARTS, f'{field}.model_input')
    check_count(message.loss_fn_inputs, MAX_INPUTS, f'{field}.loss_fn_inputs')
    _check_spans(message, field)
    inputs = {
        name: array_from_proto(tensor, f'{field}.loss_fn_inputs.{name[:100]}', budget)
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(_joined([_proto_tokens(chunk, field) for chunk in message.model_input]), inputs)


def datum_from_json(value: Any, field: str, budget: ElementBudget) -> Datum:
    body = read_model(DatumBody, value, path=field)
    inputs = {
        name: array_from_json(tensor, f'{field}.loss_fn_inputs.{name[:100]}', budget)
        for name, tensor in body.loss_fn_inputs.items()
    }
    return Datum(joined_tokens(body.model_input, f'{field}.model_input'), inputs)


def joined_tokens(prompt: ModelInput, field: str) -> Array:
    """Return the tokens of all chunks of a prompt at `field`, int64 [N]."""
    parts: list[Array] = []
    for index, chunk in enumerate(prompt.chunks):
        if chunk.type != 'encoded_text':
            raise InvalidField(f'{field}.chunks[{index}].type', TEXT_ONLY)
        if chunk.tokens is None:
            raise InvalidField(f'{field}.chunks[{index}].tokens', 'is required')
        parts.append(chunk.tokens)
    return _joined(parts)


def check_count(values: Sized, limit: int, field: str) -> None:
    if len(values) > limit:
        raise InvalidField(field, f'must have at most {limit} entries, got {len(values)}')


def _proto_tokens(chunk: wire.Chunk, field: str) -> Array:
    if not chunk.HasField('encoded_text'):
        raise InvalidField(f'{field}.model_input', TEXT_ONLY)
    data = chunk.encoded_text.tokens
    if len(data) % 4:
        raise InvalidField(f'{field}.model_input', 'must have 4 bytes for each token')
    return np.frombuffer(data, '<i4').astype('<i8')


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, '<i8')


def _check_spans(message: wire.Datum, field: str) -> None:
    """Check the spans that describe the origins of an example's tokens; the spans are not used otherwise."""
    for name in ('model_input_spans', 'loss_fn_input_spans'):
        for index, span in enumerate(getattr(message, name)):
            kind = span.WhichOneof('span')
            part = getattr(span, kind) if kind else None
            if part is None or part.offset < 0 or part.length < 0:
                raise InvalidField(f'{field}.{name}[{index}]', 'must be a range of a prompt or of a sample')


class FeatureReader:
    """Converts examples to features for one loss and one base model; a limit of 0 means unknown and is not checked."""

    def __init__(self, rule: LossRule, *, vocabulary_size: int, context_tokens: int) -> None:
        self._rule = rule
        self._required = {'target_tokens', *rule.required}
        self._vocabulary_size = vocabulary_size or 1 << 31
        self._context_tokens = context_tokens or 1 << 31

    def read(self, datum: Datum, field: str) -> input_feature_pb2.InputFeature:
        length = len(datum.tokens)
        if not 1 <= length <= self._context_tokens:
            problem = f'must have 1 to {self._context_tokens} tokens, the context of the base model; got {length}'
            raise InvalidField(f'{field}.model_input', problem)
        self._check_ids(datum.tokens, f'{field}.model_input')
        inputs = f'{field}.loss_fn_inputs'
        self._check_names(datum, inputs)
        targets = datum.inputs['target_tokens']
        self._check_targets(targets, length, f'{inputs}.target_tokens')
        feature = input_feature_pb2.InputFeature(input_ids=tensor_to_proto(datum.tokens.astype('<i4')))
        if targets.ndim == 2:
            weights = datum.inputs.get('weights', np.ones(targets.shape, '<f4'))
            _set_candidates(feature, targets, _numbers(weights, targets.shape, f'{inputs}.weights'))
            return feature
        feature.labels.CopyFrom(tensor_to_proto(targets.astype('<i4')))
        for name, array in datum.inputs.items():
            if name != 'target_tokens':
                _set(feature, name, _numbers(_broadcast(name, array, length), (length,), f'{inputs}.{name}'))
        return feature

    def _check_names(self, datum: Datum, field: str) -> None:
        known = self._required | self._rule.optional
        if unknown := sorted(set(datum.inputs) - known):
            problem = f'is not an input of this loss, which takes {", ".join(sorted(known))}'
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


def features_of(datums: Sequence[Datum], reader: FeatureReader) -> input_feature_pb2.FeatureBatch:
    """Convert all examples to one batch."""
    if not datums:
        raise InvalidField('data', 'must have at least one datum')
    features = [reader.read(datum, f'data[{index}]') for index, datum in enumerate(datums)]
    if len({datum.inputs['target_tokens'].ndim for datum in datums}) > 1:
        raise InvalidField('data', 'target_tokens must have one dimension in all datums, or two in all')
    names = set(datums[0].inputs)
    for index, datum in enumerate(datums):
        if inconsistent := sorted(names ^ set(datum.inputs)):
            field = f'data[{index}].loss_fn_inputs.{inconsistent[0][:100]}'
            raise InvalidField(field, 'must be in all datums or in none')
    return input_feature_pb2.FeatureBatch(features=features)


def _broadcast(name: str, array: Array, length: int) -> Array:
    """Repeat a clip threshold with a single value, so that each position has one; return other arrays unchanged."""
    return np.full(length, array.reshape(-1)[0]) if name in BOUNDS and array.size == 1 else array


def _numbers(array: Array, shape: tuple[int, ...], field: str) -> Array:
    if array.shape != shape:
        raise InvalidField(field, f'must have the shape {list(shape)} of target_tokens, got {list(array.shape)}')
    numbers = array.astype('<f4')
    if not np.isfinite(numbers).all():
        raise InvalidField(field, 'must contain only finite numbers')
    return numbers


def _set(feature: input_feature_pb2.InputFeature, name: str, array: Array) -> None:
    tensor = tensor_to_proto(array)
    if name in _NATIVE_NAMES:
        getattr(feature, _NATIVE_NAMES[name]).CopyFrom(tensor)
    else:
        feature.extra_tensors[name].CopyFrom(tensor)


def _set_candidates(feature: input_feature_pb2.InputFeature, targets: Array, weights: Array) -> None:
    """Set several target tokens for each position; the labels only mark the positions that count."""
    feature.labels.CopyFrom(tensor_to_proto(targets[:, 0].astype('<i4')))
    feature.extra_tensors['target_ids'].CopyFrom(tensor_to_proto(targets))
    feature.extra_tensors['target_weights'].CopyFrom(tensor_to_proto(weights))


def probe_from_json(
    targets: dict[str, Any] | None, draw_count: int, *, prompt_length: int
) -> sampling_pb2.PromptProbe | None:
    """Return the native probe of a prompt, or None if the request neither has `targets` nor draws tokens."""
    if targets is None and not draw_count:
        return None
    matrix: Array | None = None
    if targets is not None:
        matrix = array_from_json(targets, TARGETS, ElementBudget(MAX_TARGET_ELEMENTS), missing=NO_TARGET)
    try:
        PromptProbe(target_token_ids=matrix, draw_count=draw_count).check(prompt_length, MAX_TOKEN_ID + 1)
    except InvalidProbe as error:
        raise InvalidField(DRAW_COUNT if error.field.endswith('count') else TARGETS, error.problem) from error
    token_ids = None if matrix is None else tensor_to_proto(matrix.astype(np.int32))
    return sampling_pb2.PromptProbe(target_token_ids=token_ids, draw_count=draw_count)
