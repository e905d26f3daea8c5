"""The receipt of an operation: the resources that it used."""

from datetime import timedelta
from typing import TypedDict

from twinkle.api.model.v1 import operation_result_pb2


class Receipt(TypedDict):
    """Resources used by an operation."""

    token_count: int
    """Number of tokens of the batch, without padding."""
    padding_token_count: int
    """Number of computed padding tokens."""
    device_time: timedelta
    """Time on the device. The time of a shared pass is divided among its operations."""
    queue_time: timedelta
    """Time in the queue."""
    request_bytes: int
    """Size of the request in bytes."""
    pass_count: int
    """Number of model passes that the operation took part in."""
    pass_adapter_count: int
    """Maximum number of adapters in one of these passes, including the operation's adapter."""
    shared_token_count: int
    """Number of tokens whose results were taken from an equal prefix of another sequence in the same pass."""


def receipt_of(result: operation_result_pb2.OperationResult) -> Receipt:
    """Return the receipt of a result."""
    receipt = result.receipt
    return Receipt(
        token_count=receipt.token_count,
        padding_token_count=receipt.padding_token_count,
        device_time=receipt.device_time.ToTimedelta(),
        queue_time=receipt.queue_time.ToTimedelta(),
        request_bytes=receipt.request_bytes,
        pass_count=receipt.pass_count,
        pass_adapter_count=receipt.pass_adapter_count,
        shared_token_count=receipt.shared_token_count,
    )
