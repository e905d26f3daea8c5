"""Inspects serialized requests to the model service, and marks those that a quota refuses.

A marked request is still sent, because only the model service recognizes a repeated request, and returns the first
response to it. Requests may be large, so they are searched for single fields and not parsed.
"""

from services.kit.errors import InvalidField
from services.kit.rpc.serialized_fields import UnreadableMessageError, peek_text
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_service_pb2

_OPERATION = training_service_pb2.ExecuteRequest.OPERATION_FIELD_NUMBER
_SAVE = operation_pb2.Operation.SAVE_FIELD_NUMBER
_NAME = operation_pb2.Save.NAME_FIELD_NUMBER
_REQUEST_ID = adapter_service_pb2.CreateAdapterRequest.REQUEST_ID_FIELD_NUMBER


def is_save(request: bytes) -> bool:
    """Return whether an ExecuteRequest or TrainRequest saves a named checkpoint.

    Raises:
        InvalidField: the bytes are not a valid message.
    """
    try:
        return bool(peek_text(request, _OPERATION, _SAVE, _NAME))
    except UnreadableMessageError as error:
        raise InvalidField('operation', f'cannot be read: {error}') from error


def refused_save(request: bytes, limit: int) -> bytes:
    """Mark an ExecuteRequest or TrainRequest that saves, so that it is refused unless it is a repeat.

    The mark is the tenant's storage limit in bytes. It is appended, because concatenated protobuf messages are merged.
    """
    save = operation_pb2.Save(stored_bytes_limit=limit)
    addition = training_service_pb2.ExecuteRequest(operation=operation_pb2.Operation(save=save))
    return request + addition.SerializeToString()


def refused_creation(request: bytes, limit: int) -> bytes:
    """Append the tenant's limit of adapters to a CreateAdapterRequest, so that it is refused unless it is a repeat.

    Raises:
        InvalidField: the bytes are not a valid message, so an appended field could become part of a truncated one.
    """
    try:
        peek_text(request, _REQUEST_ID)
    except UnreadableMessageError as error:
        raise InvalidField('request_id', f'cannot be read: {error}') from error
    return request + adapter_service_pb2.CreateAdapterRequest(adapters_limit=limit).SerializeToString()
