"""Methods that follow an adapter's operations and cancel queued operations."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from twinkle.api.model.v1 import operation_result_pb2, training_service_pb2
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle_client.client import TwinkleClient
from twinkle_client.model.handle import ModelHandle
from twinkle_client.rpc import remote_method, remote_stream


class WatchingVerbs(ModelHandle):
    """Methods that watch operations; `adapter_name` may be omitted if there is one adapter."""

    def __init__(self, model_id: str, *, client: TwinkleClient | None = None) -> None:
        super().__init__(model_id, client=client)
        self._training = TrainingServiceStub(self._connection.channel)

    @remote_stream
    async def watch_operations(
        self, *, after: int = 0, adapter_name: str | None = None
    ) -> AsyncIterator[operation_result_pb2.OperationResult]:
        """Yield the results of the adapter's operations in order, including operations that other programs send.

        The stream continues until the caller closes it. After a lost connection, it resumes if the server is available
        again within the client's retry timeout.

        Args:
            after: Number of the operation after which to start.
            adapter_name: Unset: the only adapter.

        Raises:
            NotFoundError: The adapter was deleted, or the result after `after` is no longer on record.
        """
        request = training_service_pb2.WatchOperationsRequest(
            adapter_id=self._adapter(adapter_name).adapter_id, after_sequence_number=after
        )

        def resume_after(response: training_service_pb2.WatchOperationsResponse) -> None:
            request.after_sequence_number = response.result.sequence_number

        call = self._training.WatchOperations
        async with aclosing(self._connection.resumed_stream(call, request, resume_after=resume_after)) as responses:
            async for response in responses:
                yield response.result

    @remote_method
    async def cancel_operation(self, sequence_number: int, *, adapter_name: str | None = None) -> bool:
        """Cancel an operation that waits or needs more passes; return False if it is in its last pass or has finished.

        The sender of a cancelled operation receives a `CancelledError`, and the adapter does not change. Later
        operations still run, because the sender's handle uses the number again.

        Raises:
            NotFoundError: The operation was not accepted, or is no longer on record.
        """
        request = training_service_pb2.CancelOperationRequest(
            adapter_id=self._adapter(adapter_name).adapter_id, sequence_number=sequence_number
        )
        return (await self._connection.unary(self._training.CancelOperation, request)).is_cancelled
