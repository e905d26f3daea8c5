"""Converts requests for adapters and estimates. Every error names its field."""

import re
from collections.abc import Mapping

from twinkle.api.model.v1 import adapter_service_pb2, training_config_pb2
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import (
    adapter_id_from_proto,
    base_model_from_proto,
    duration_to_proto,
    fingerprint_of,
    id_from_proto,
)
from twinkle_services.kit.rpc.message_bounds import check_bytes, check_options
from twinkle_services.kit.weights.wire import MAX_NAMES, lora_config_from_proto
from twinkle_services.model.api.convert_config import optimizer_from_proto, training_config_from_proto
from twinkle_services.model.api.convert_verb import check_checkpoint_path
from twinkle_services.model.application.create_adapter import CreateAdapterRequest
from twinkle_services.model.application.estimate import EstimateRequest
from twinkle_services.model.domain.plan import PlanCost, TrainingPlan

_MAX_LABELS, _MAX_NAME_LENGTH, _MAX_VALUE_LENGTH = 64, 256, 4096
"""Maximum number of labels per adapter, and of characters in a name and a value. Labels stay in memory as long as the
adapter exists."""
_MAX_SESSION_ID_LENGTH = 128
_MAX_NAMES_BYTES = 1 << 20
"""Maximum size in bytes of the message that names an adapter's modules or parameters."""
_SAVE_PREFIX = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}')


def create_request_from_proto(request: adapter_service_pb2.CreateAdapterRequest) -> CreateAdapterRequest:
    """Convert a request for a new adapter, and clear the field `adapters_limit` of the message.

    Raises:
        InvalidField: A field is missing, malformed or out of range.
    """
    _check_labels(request.user_metadata)
    check_options(request.training_config, 'training_config')
    _check_names(request)
    adapters_limit = request.adapters_limit if request.HasField('adapters_limit') else None
    # The gateway sets the limit only while the quota is exhausted, so it is not part of the request's fingerprint.
    request.ClearField('adapters_limit')
    if request.checkpoint_path:
        check_checkpoint_path(request.checkpoint_path, 'checkpoint_path')
    if request.is_optimizer_included and not request.checkpoint_path:
        raise InvalidField('is_optimizer_included', 'must be false if checkpoint_path is empty')
    if request.HasField('full_parameters') and request.HasField('lora_config'):
        raise InvalidField('lora_config', 'must be unset with full_parameters: the base model itself is trained')
    lora_config = (
        lora_config_from_proto(request.lora_config, 'lora_config') if request.HasField('lora_config') else None
    )
    return CreateAdapterRequest(
        request_id=id_from_proto(request.request_id, 'request_id'),
        base_model=base_model_from_proto(request.base_model, 'base_model'),
        lora_config=lora_config,
        training_config=training_config_from_proto(request.training_config, 'training_config'),
        user_metadata=dict(request.user_metadata),
        checkpoint_path=request.checkpoint_path,
        is_optimizer_included=request.is_optimizer_included,
        full_parameters=full_parameters_from_proto(request.full_parameters, 'full_parameters')
        if request.HasField('full_parameters')
        else None,
        adapter_id=adapter_id_from_proto(request.adapter_id, 'adapter_id') if request.adapter_id else '',
        session_id=session_id_from_proto(request.session_id),
        adapters_limit=adapters_limit,
        fingerprint=fingerprint_of(request),
    )


def session_id_from_proto(session_id: str) -> str:
    """Return a session id, which may be empty.

    Raises:
        InvalidField: The id is too long.
    """
    if len(session_id) > _MAX_SESSION_ID_LENGTH:
        raise InvalidField(
            'session_id', f'must have at most {_MAX_SESSION_ID_LENGTH} characters, got {len(session_id)}'
        )
    return session_id


def save_prefix_from_proto(prefix: str) -> str:
    """Return the prefix of a checkpoint's name, which may be empty.

    Raises:
        InvalidField: The prefix is malformed.
    """
    if prefix and not _SAVE_PREFIX.fullmatch(prefix):
        raise InvalidField(
            'save_prefix', "must be up to 64 letters, digits, '.', '_' and '-', starting with a letter or digit"
        )
    return prefix


def _check_names(request: adapter_service_pb2.CreateAdapterRequest | adapter_service_pb2.EstimateRequest) -> None:
    for name in ('lora_config', 'full_parameters'):
        check_bytes(getattr(request, name), name, limit=_MAX_NAMES_BYTES)


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > _MAX_LABELS:
        raise InvalidField('user_metadata', f'must have at most {_MAX_LABELS} labels, got {len(labels)}')
    for name, value in labels.items():
        if len(name) > _MAX_NAME_LENGTH:
            raise InvalidField('user_metadata', f'must have names of at most {_MAX_NAME_LENGTH} characters')
        if len(value) > _MAX_VALUE_LENGTH:
            raise InvalidField(f'user_metadata[{name!r}]', f'must have at most {_MAX_VALUE_LENGTH} characters')


def full_parameters_from_proto(message: training_config_pb2.FullParameterConfig, field: str) -> tuple[str, ...]:
    """Return the names of the parameters to train; an empty tuple selects all parameters.

    Raises:
        InvalidField: There are too many names, or a name is empty or repeated.
    """
    names = tuple(message.target_modules)
    if len(names) > MAX_NAMES:
        raise InvalidField(f'{field}.target_modules', f'must have at most {MAX_NAMES} names, got {len(names)}')
    seen: set[str] = set()
    for index, name in enumerate(names):
        if not name or name in seen:
            raise InvalidField(f'{field}.target_modules[{index}]', f'must be a name that occurs once, got {name!r}')
        seen.add(name)
    return names


def estimate_request_from_proto(request: adapter_service_pb2.EstimateRequest) -> EstimateRequest:
    """Convert a request for an estimate.

    Raises:
        InvalidField: A field is missing or out of range.
    """
    for name in ('batch_size', 'sequence_tokens'):
        if getattr(request, name) < 1:
            raise InvalidField(name, f'must be at least 1, got {getattr(request, name)}')
    label_share = request.label_share if request.HasField('label_share') else 1.0
    if not 0.0 < label_share <= 1.0:
        raise InvalidField('label_share', f'must be above 0 and at most 1, got {label_share}')
    if request.HasField('full_parameters') and request.HasField('lora_config'):
        raise InvalidField('lora_config', 'must be unset with full_parameters: the base model itself is trained')
    check_options(request.optimizer, 'optimizer')
    _check_names(request)
    plan = TrainingPlan(
        lora_config=lora_config_from_proto(request.lora_config, 'lora_config'),
        full_parameters=full_parameters_from_proto(request.full_parameters, 'full_parameters')
        if request.HasField('full_parameters')
        else None,
        optimizer=optimizer_from_proto(request.optimizer, 'optimizer'),
        batch_size=request.batch_size,
        sequence_tokens=request.sequence_tokens,
        label_share=label_share,
    )
    return EstimateRequest(base_model=base_model_from_proto(request.base_model, 'base_model'), plan=plan)


def cost_to_proto(cost: PlanCost) -> adapter_service_pb2.EstimateResponse:
    return adapter_service_pb2.EstimateResponse(
        does_fit=cost.does_fit,
        adapter_bytes=cost.adapter_bytes,
        peak_bytes=cost.peak_bytes,
        step_time=duration_to_proto(cost.step_time),
        available_bytes=cost.available_bytes,
        parameter_count=cost.parameter_count,
        is_measured_under_load=cost.is_measured_under_load,
    )
