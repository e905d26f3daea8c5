"""What an operation cost."""

from datetime import timedelta
from typing import TypedDict

from twinkle.api.model.v1 import operation_result_pb2


class Receipt(TypedDict):
    """What an operation cost."""

    token_count: int
    """Tokens computed, padding left out."""
    padding_token_count: int
    """Tokens of padding computed."""
    device_time: timedelta
    """On the device; shared passes are divided among those who shared them."""
    queue_time: timedelta
    """Waiting for its turn."""
    request_bytes: int
    pass_count: int
    """Passes of the model it took part in."""
    pass_adapter_count: int
    """Adapters that shared the fullest of them, this one included."""


def receipt_of(result: operation_result_pb2.OperationResult) -> Receipt:
    """Return what an operation cost."""
    receipt = result.receipt
    return Receipt(
        token_count=receipt.token_count,
        padding_token_count=receipt.padding_token_count,
        device_time=receipt.device_time.ToTimedelta(),
        queue_time=receipt.queue_time.ToTimedelta(),
        request_bytes=receipt.request_bytes,
        pass_count=receipt.pass_count,
        pass_adapter_count=receipt.pass_adapter_count,
    )
