"""Servicer of TrainingService, which runs, looks up, watches and cancels operations, and receives uploaded batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from twinkle.api.model.v1 import training_service_pb2 as wire
from twinkle.api.model.v1 import training_service_pb2_grpc
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto, not_negative
from twinkle_services.model.api.convert_operation import OperationReader, max_wait_from_proto
from twinkle_services.model.api.convert_result import record_to_proto, result_to_proto
from twinkle_services.model.api.convert_upload import upload_parts_from_proto, upload_to_proto
from twinkle_services.model.application.service import ModelService
from twinkle_services.model.application.train_stream import OperationFailure
from twinkle_services.model.domain.operation import Operation

Context = grpc.aio.ServicerContext


class TrainingServicer(training_service_pb2_grpc.TrainingServiceServicer):
    """Converts messages and calls the application."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._read = OperationReader(
            service.read_upload,
            vocabulary_size=service.vocabulary_size,
            max_batch_examples=service.max_batch_examples,
        )

    async def Execute(  # noqa: N802 - name of the RPC
        self, request: wire.ExecuteRequest, context: Context[Any, Any]
    ) -> wire.ExecuteResponse:
        caller = current_caller()
        operation = await self._read(caller, request.operation, 'operation')
        result = await self._service.execute_operation(caller, operation, is_waiting_allowed=request.is_waiting_allowed)
        return wire.ExecuteResponse(result=result_to_proto(result))

    async def Train(  # noqa: N802 - name of the RPC
        self, request_iterator: AsyncIterator[wire.TrainRequest], context: Context[Any, Any]
    ) -> AsyncIterator[wire.TrainResponse]:
        caller = current_caller()
        operations = self._operations(caller, request_iterator)
        async with aclosing(self._service.train_stream(caller, operations)) as results:
            async for result in results:
                yield wire.TrainResponse(result=result_to_proto(result))

    async def UploadBatch(  # noqa: N802 - name of the RPC
        self, request_iterator: AsyncIterator[wire.UploadBatchRequest], context: Context[Any, Any]
    ) -> wire.UploadBatchResponse:
        parts = upload_parts_from_proto(request_iterator)
        return upload_to_proto(await self._service.upload_batch(current_caller(), parts))

    async def GetOperation(  # noqa: N802 - name of the RPC
        self, request: wire.GetOperationRequest, context: Context[Any, Any]
    ) -> wire.GetOperationResponse:
        adapter_id = id_from_proto(request.adapter_id, 'adapter_id')
        record = await self._service.operations.find(current_caller(), adapter_id, request.sequence_number)
        return wire.GetOperationResponse(**record_to_proto(record, adapter_id, request.sequence_number))

    async def WaitOperation(  # noqa: N802 - name of the RPC
        self, request: wire.WaitOperationRequest, context: Context[Any, Any]
    ) -> wire.WaitOperationResponse:
        adapter_id = id_from_proto(request.adapter_id, 'adapter_id')
        max_wait = max_wait_from_proto(request)
        record = await self._service.operations.find(
            current_caller(), adapter_id, request.sequence_number, max_wait=max_wait
        )
        return wire.WaitOperationResponse(**record_to_proto(record, adapter_id, request.sequence_number))

    async def WatchOperations(  # noqa: N802 - name of the RPC
        self, request: wire.WatchOperationsRequest, context: Context[Any, Any]
    ) -> AsyncIterator[wire.WatchOperationsResponse]:
        adapter_id = id_from_proto(request.adapter_id, 'adapter_id')
        after = not_negative(request.after_sequence_number, 'after_sequence_number')
        async with aclosing(self._service.operations.watch(current_caller(), adapter_id, after=after)) as results:
            async for result in results:
                yield wire.WatchOperationsResponse(result=result_to_proto(result))

    async def CancelOperation(  # noqa: N802 - name of the RPC
        self, request: wire.CancelOperationRequest, context: Context[Any, Any]
    ) -> wire.CancelOperationResponse:
        adapter_id = id_from_proto(request.adapter_id, 'adapter_id')
        is_cancelled = await self._service.operations.cancel(current_caller(), adapter_id, request.sequence_number)
        return wire.CancelOperationResponse(is_cancelled=is_cancelled)

    async def _operations(
        self, caller: Caller, requests: AsyncIterator[wire.TrainRequest]
    ) -> AsyncIterator[Operation | OperationFailure]:
        async for request in requests:
            message = request.operation
            try:
                yield await self._read(caller, message, 'operation')
            except DomainError as error:
                # A malformed operation does not close the stream.
                yield OperationFailure(message.adapter_id, message.sequence_number, error)
