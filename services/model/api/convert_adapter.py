"""Requests about adapters from messages to the domain. Every check names its field."""

import hashlib

from services.kit.errors import InvalidField
from services.model.api.convert_config import lora_config_from_proto, training_config_from_proto
from services.model.api.convert_operation import check_checkpoint_path
from services.model.application.create_adapter import CreateAdapterCommand
from twinkle.api.model.v1 import adapter_service_pb2

_MAX_METADATA = 64
_MAX_ID_LENGTH = 128


def create_command_from_proto(request: adapter_service_pb2.CreateAdapterRequest) -> CreateAdapterCommand:
    """Return what is asked for.

    Raises:
        InvalidField: something is missing, malformed or out of range.
    """
    if not 0 < len(request.request_id) <= _MAX_ID_LENGTH:
        raise InvalidField('request_id', f'must be 1 to {_MAX_ID_LENGTH} characters')
    if not request.base_model:
        raise InvalidField('base_model', 'must be set; GetServerInfo lists what is served')
    if len(request.user_metadata) > _MAX_METADATA:
        raise InvalidField('user_metadata', f'must hold at most {_MAX_METADATA} labels')
    if request.checkpoint_path:
        check_checkpoint_path(request.checkpoint_path, 'checkpoint_path')
    if request.is_optimizer_included and not request.checkpoint_path:
        raise InvalidField('is_optimizer_included', 'has no effect without checkpoint_path')
    lora_config = (
        lora_config_from_proto(request.lora_config, 'lora_config') if request.HasField('lora_config') else None
    )
    return CreateAdapterCommand(
        request_id=request.request_id,
        base_model=request.base_model,
        lora_config=lora_config,
        training_config=training_config_from_proto(request.training_config, 'training_config'),
        user_metadata=dict(request.user_metadata),
        checkpoint_path=request.checkpoint_path,
        is_optimizer_included=request.is_optimizer_included,
        fingerprint=hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest(),
    )


def adapter_id_from_proto(adapter_id: str) -> str:
    """Return the id of a request.

    Raises:
        InvalidField: it is not set.
    """
    if not adapter_id:
        raise InvalidField('adapter_id', 'must be set')
    return adapter_id
