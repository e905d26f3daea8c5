"""What quotas have to know of serialized requests to the model service, and what they add to them.

Requests may be large, and are not parsed here.
"""

from services.kit.errors import InvalidField
from services.kit.rpc.serialized_fields import UnreadableMessageError, peek_text
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_service_pb2

_OPERATION = training_service_pb2.ExecuteRequest.OPERATION_FIELD_NUMBER
_SAVE = operation_pb2.Operation.SAVE_FIELD_NUMBER
_NAME = operation_pb2.Save.NAME_FIELD_NUMBER
_REQUEST_ID = adapter_service_pb2.CreateAdapterRequest.REQUEST_ID_FIELD_NUMBER


def is_save(request: bytes) -> bool:
    """Say whether an ExecuteRequest, or a TrainRequest, saves a checkpoint: one without a name is refused anyway.

    Raises:
        InvalidField: it cannot be read.
    """
    try:
        return bool(peek_text(request, _OPERATION, _SAVE, _NAME))
    except UnreadableMessageError as error:
        raise InvalidField('operation', f'cannot be read: {error}') from error


def refused_save(request: bytes, limit: int) -> bytes:
    """Return an ExecuteRequest, or a TrainRequest, that saves, with what has it refused unless it is on record.

    Args:
        request: the bytes of one message after those of another are the two merged; the rest is not touched.
        limit: how many bytes the tenant may store.
    """
    save = operation_pb2.Save(stored_bytes_limit=limit)
    addition = training_service_pb2.ExecuteRequest(operation=operation_pb2.Operation(save=save))
    return request + addition.SerializeToString()


def refused_creation(request: bytes, limit: int) -> bytes:
    """Return a CreateAdapterRequest with what has it refused unless it is on record.

    Args:
        request: the bytes of one message after those of another are the two merged; the rest is not touched.
        limit: how many adapters the tenant may have.

    Raises:
        InvalidField: it cannot be read: what is put after half a field would become part of it.
    """
    try:
        peek_text(request, _REQUEST_ID)
    except UnreadableMessageError as error:
        raise InvalidField('request_id', f'cannot be read: {error}') from error
    return request + adapter_service_pb2.CreateAdapterRequest(adapters_limit=limit).SerializeToString()
