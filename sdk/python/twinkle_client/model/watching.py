"""Following an adapter's operations, and dropping one that waits."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from twinkle.api.model.v1 import operation_result_pb2, training_service_pb2
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import RetryableError
from twinkle_client.model.handle import ModelHandle
from twinkle_client.rpc import remote_method, remote_stream


class WatchingVerbs(ModelHandle):
    """Each takes `adapter_name`; without it the only adapter is meant."""

    def __init__(self, model_id: str, *, client: TwinkleClient | None = None) -> None:
        """See `ModelHandle`."""
        super().__init__(model_id, client=client)
        self._training = TrainingServiceStub(self._connection.channel)

    @remote_stream
    async def watch_operations(
        self, *, after: int = 0, adapter_name: str | None = None
    ) -> AsyncIterator[operation_result_pb2.OperationResult]:
        """Yield the result of each of the adapter's operations in order, whoever sent it, until left.

        A watch that breaks goes on where it was, for as long as the client is patient.

        Args:
            after: begin after this operation.
            adapter_name: unset: the only adapter.

        Raises:
            NotFoundError: the adapter is gone, or `after` is no longer on record.
        """
        request = training_service_pb2.WatchOperationsRequest(
            adapter_id=self._adapter(adapter_name).adapter_id, after_sequence_number=after
        )
        while True:
            has_come = False
            try:
                async with aclosing(self._connection.stream(self._training.WatchOperations, request)) as responses:
                    async for response in responses:
                        has_come = True
                        request.after_sequence_number = response.result.sequence_number
                        yield response.result
                return
            except RetryableError:
                # Where nothing came, the connection has been patient already.
                if not has_come:
                    raise

    @remote_method
    async def cancel_operation(self, sequence_number: int, *, adapter_name: str | None = None) -> bool:
        """Drop an operation that still waits; return whether it came in time.

        Whoever sent it gets a `CancelledError`; those after it go on.
        """
        request = training_service_pb2.CancelOperationRequest(
            adapter_id=self._adapter(adapter_name).adapter_id, sequence_number=sequence_number
        )
        return (await self._connection.unary(self._training.CancelOperation, request)).is_cancelled
