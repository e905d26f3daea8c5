"""Converts the verbs of operations, with one function for each verb."""

import math
import re
from collections.abc import Callable
from typing import Any

from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.checkpoint_engine.rounding import ROUNDED_DTYPES
from twinkle_services.kit.errors import InvalidField, NotBuiltYet
from twinkle_services.kit.rpc.fields import labels_from_proto, name_from_proto, ttl_from_proto
from twinkle_services.kit.rpc.json_values import dict_from_struct
from twinkle_services.kit.rpc.tensors import dtype_from_proto
from twinkle_services.model.api.convert_config import loss_from_proto, training_config_from_proto
from twinkle_services.model.api.convert_features import features_from_proto, gradients_from_proto
from twinkle_services.model.domain import operation as domain
from twinkle_services.model.domain.training_config import LossChoice

_MAX_MICRO_BATCHES = 64
"""Maximum number of passes into which `micro_batch_size` may divide a batch. Many small passes would occupy the device
for a long time, although the batch has few tokens."""
_PATH = re.compile(r'twinkle://[^/\s]+/weights/[^/\s]+')


def verb_from_proto(message: wire.Operation, field: str, *, vocabulary_size: int) -> domain.Verb:
    """Convert an operation's verb; see `operation_from_proto` for the arguments.

    Raises:
        InvalidField: A field is missing, malformed or out of range.
        NotBuiltYet: The verb or the source of the batch is not supported yet.
    """
    name = message.WhichOneof('verb')
    if name is None:
        raise InvalidField(f'{field}.verb', 'must be set')
    if name not in _VERBS:
        raise NotBuiltYet(f'the operation {name}')
    return _VERBS[name](getattr(message, name), f'{field}.{name}', vocabulary_size)


def _options(message: wire.ForwardOptions, field: str, *, example_count: int) -> domain.ForwardOptions:
    temperature = message.temperature if message.HasField('temperature') else 1.0
    _check_positive(temperature, f'{field}.temperature')
    micro_batch_size = message.micro_batch_size if message.HasField('micro_batch_size') else None
    least = max(1, math.ceil(example_count / _MAX_MICRO_BATCHES))
    if micro_batch_size is not None and micro_batch_size < least:
        problem = f'must be at least {least} for {example_count} examples, got {micro_batch_size}'
        raise InvalidField(f'{field}.micro_batch_size', problem)
    return domain.ForwardOptions(
        temperature=temperature,
        is_adapter_disabled=message.is_adapter_disabled,
        is_logprobs_returned=message.is_logprobs_returned if message.HasField('is_logprobs_returned') else True,
        micro_batch_size=micro_batch_size,
        is_routed_experts_returned=message.is_routed_experts_returned,
    )


def _forward_only(message: wire.ForwardOnly, field: str, vocabulary_size: int) -> domain.ForwardOnly:
    features = features_from_proto(message.batch, f'{field}.batch', vocabulary_size=vocabulary_size)
    return domain.ForwardOnly(
        features=features,
        options=_options(message.options, f'{field}.options', example_count=len(features)),
        loss=_loss_of_batch(message, field),
    )


def _forward(message: wire.Forward, field: str, vocabulary_size: int) -> domain.Forward:
    features = features_from_proto(message.batch, f'{field}.batch', vocabulary_size=vocabulary_size)
    options = _options(message.options, f'{field}.options', example_count=len(features))
    return domain.Forward(features=features, options=options)


def _forward_backward(message: wire.ForwardBackward, field: str, vocabulary_size: int) -> domain.ForwardBackward:
    features = features_from_proto(message.batch, f'{field}.batch', vocabulary_size=vocabulary_size)
    options = _options(message.options, f'{field}.options', example_count=len(features))
    if options.is_adapter_disabled:
        raise InvalidField(f'{field}.options.is_adapter_disabled', 'must be false: nothing would be trained')
    return domain.ForwardBackward(features=features, options=options, loss=_loss_of_batch(message, field))


def _loss_of_batch(message: wire.ForwardOnly | wire.ForwardBackward, field: str) -> LossChoice | None:
    return loss_from_proto(message.loss, f'{field}.loss') if message.HasField('loss') else None


def _backward(message: wire.Backward, field: str, vocabulary_size: int) -> domain.Backward:
    del vocabulary_size
    gradients = gradients_from_proto(list(message.logprob_gradients), f'{field}.logprob_gradients')
    return domain.Backward(logprob_gradients=gradients)


def _clip(message: wire.ClipGradNorm | wire.ClipGradAndStep, field: str) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if message.HasField('max_grad_norm'):
        if not message.max_grad_norm > 0.0:
            raise InvalidField(f'{field}.max_grad_norm', f'must be positive, got {message.max_grad_norm}')
        limits['max_grad_norm'] = message.max_grad_norm
    if message.HasField('max_grad_value'):
        _check_positive(message.max_grad_value, f'{field}.max_grad_value')
        limits['max_grad_value'] = message.max_grad_value
    if message.HasField('norm_type'):
        if not message.norm_type >= 1.0:
            raise InvalidField(f'{field}.norm_type', f'must be at least 1, got {message.norm_type}')
        limits['norm_type'] = message.norm_type
    return limits


def _clip_grad_norm(message: wire.ClipGradNorm, field: str, vocabulary_size: int) -> domain.ClipGradNorm:
    del vocabulary_size
    return domain.ClipGradNorm(**_clip(message, field))


def _clip_grad_and_step(message: wire.ClipGradAndStep, field: str, vocabulary_size: int) -> domain.ClipGradAndStep:
    del vocabulary_size
    return domain.ClipGradAndStep(**_clip(message, field), **_step_options(message, field))


def _step(message: wire.Step, field: str, vocabulary_size: int) -> domain.Step:
    del vocabulary_size
    return domain.Step(**_step_options(message, field))


def _step_options(message: wire.Step | wire.ClipGradAndStep, field: str) -> dict[str, Any]:
    rate = message.learning_rate if message.HasField('learning_rate') else None
    if rate is not None and not 0.0 <= rate < math.inf:
        raise InvalidField(f'{field}.learning_rate', f'must be at least 0 and finite, got {rate}')
    options = dict_from_struct(message.optimizer_options)
    if 'lr' in options:
        raise InvalidField(f'{field}.optimizer_options.lr', 'must be unset; set the field learning_rate instead')
    return {'learning_rate': rate, 'optimizer_options': options, 'is_health_returned': message.is_health_returned}


def _calculate_metric(message: wire.CalculateMetric, field: str, vocabulary_size: int) -> domain.CalculateMetric:
    del field, vocabulary_size
    return domain.CalculateMetric(is_training=message.is_training)


def _configure(message: wire.Configure, field: str, vocabulary_size: int) -> domain.Configure:
    del vocabulary_size
    if not message.HasField('training_config'):
        raise InvalidField(f'{field}.training_config', 'must be set')
    return domain.Configure(
        training_config=training_config_from_proto(message.training_config, f'{field}.training_config')
    )


def _save(message: wire.Save, field: str, vocabulary_size: int) -> domain.Save:
    del vocabulary_size
    consumed = message.consumed_train_samples if message.HasField('consumed_train_samples') else None
    if consumed is not None and consumed < 0:
        raise InvalidField(f'{field}.consumed_train_samples', f'must be at least 0, got {consumed}')
    if consumed is not None and not message.is_optimizer_included:
        raise InvalidField(f'{field}.consumed_train_samples', 'must be unset without is_optimizer_included')
    return domain.Save(
        name=name_from_proto(message.name, f'{field}.name'),
        is_optimizer_included=message.is_optimizer_included,
        is_overwrite_allowed=message.is_overwrite_allowed,
        ttl=ttl_from_proto(message.ttl, f'{field}.ttl') if message.HasField('ttl') else None,
        consumed_train_samples=consumed,
        user_metadata=labels_from_proto(message.user_metadata, f'{field}.user_metadata'),
        stored_bytes_limit=message.stored_bytes_limit if message.HasField('stored_bytes_limit') else None,
    )


def check_checkpoint_path(path: str, field: str) -> str:
    """Return `path` after checking its form.

    Raises:
        InvalidField: The path is malformed.
    """
    if not _PATH.fullmatch(path):
        raise InvalidField(field, "must be of the form 'twinkle://<run>/weights/<name>'")
    return path


def _load(message: wire.Load, field: str, vocabulary_size: int) -> domain.Load:
    del vocabulary_size
    path = check_checkpoint_path(message.checkpoint_path, f'{field}.checkpoint_path')
    return domain.Load(checkpoint_path=path, is_optimizer_included=message.is_optimizer_included)


def _publish_version(message: wire.PublishVersion, field: str, vocabulary_size: int) -> domain.PublishVersion:
    del vocabulary_size
    dtype = dtype_from_proto(message.dtype, f'{field}.dtype') if message.HasField('dtype') else None
    if dtype is not None and dtype not in ROUNDED_DTYPES:
        raise InvalidField(f'{field}.dtype', f'must be one of {", ".join(ROUNDED_DTYPES)}, got {dtype}')
    return domain.PublishVersion(is_pinned=message.is_pinned, dtype=dtype)


def _undo(message: wire.Undo, field: str, vocabulary_size: int) -> domain.Undo:
    del vocabulary_size
    if message.step_count < 1:
        raise InvalidField(f'{field}.step_count', f'must be at least 1, got {message.step_count}')
    return domain.Undo(step_count=message.step_count)


def _export_merged(message: wire.ExportMerged, field: str, vocabulary_size: int) -> domain.ExportMerged:
    del vocabulary_size
    return domain.ExportMerged(name=name_from_proto(message.name, f'{field}.name'))


def _without_fields(
    verb: type[domain.CalculateLoss | domain.ZeroGrad | domain.LrStep],
) -> Callable[[Any, str, int], domain.Verb]:
    """Return the converter of a verb without fields."""

    def convert(message: Any, field: str, vocabulary_size: int) -> domain.Verb:
        del message, field, vocabulary_size
        return verb()

    return convert


def _check_positive(value: float, field: str) -> None:
    if not 0.0 < value < math.inf:
        raise InvalidField(field, f'must be positive and finite, got {value}')


_VERBS: dict[str, Callable[[Any, str, int], domain.Verb]] = {
    'forward_only': _forward_only,
    'forward': _forward,
    'calculate_loss': _without_fields(domain.CalculateLoss),
    'backward': _backward,
    'forward_backward': _forward_backward,
    'clip_grad_norm': _clip_grad_norm,
    'step': _step,
    'zero_grad': _without_fields(domain.ZeroGrad),
    'lr_step': _without_fields(domain.LrStep),
    'clip_grad_and_step': _clip_grad_and_step,
    'calculate_metric': _calculate_metric,
    'configure': _configure,
    'save': _save,
    'load': _load,
    'publish_version': _publish_version,
    'undo': _undo,
    'export_merged': _export_merged,
}
"""Converters by the name of the verb's field in the message. Other verbs are not supported yet."""
