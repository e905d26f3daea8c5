"""Operations on adapters, on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from services.kit.errors import DomainError
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto
from services.model.api.convert_operation import operation_from_proto, patience_from_proto
from services.model.api.convert_result import record_to_proto, result_to_proto
from services.model.application.train_stream import Refused
from services.model.application.verbs import Verbs
from services.model.domain.operation import Operation
from twinkle.api.model.v1 import training_service_pb2 as wire
from twinkle.api.model.v1 import training_service_pb2_grpc

Context = grpc.aio.ServicerContext


class TrainingServicer(training_service_pb2_grpc.TrainingServiceServicer):
    """Unpacks, delegates, packs."""

    def __init__(self, verbs: Verbs) -> None:
        """Serve `verbs`."""
        self._verbs = verbs

    async def Execute(  # noqa: N802 - the contract's name
        self, request: wire.ExecuteRequest, context: Context[Any, Any]
    ) -> wire.ExecuteResponse:
        """Carry out one operation."""
        operation = operation_from_proto(request.operation, 'operation', vocabulary_size=self._verbs.vocabulary_size)
        result = await self._verbs.execute_operation(
            current_caller(), operation, is_waiting_allowed=request.is_waiting_allowed
        )
        return wire.ExecuteResponse(result=result_to_proto(result))

    async def Train(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[wire.TrainRequest], context: Context[Any, Any]
    ) -> AsyncIterator[wire.TrainResponse]:
        """Carry out the operations of a stream."""
        operations = self._operations(request_iterator)
        async with aclosing(self._verbs.train_stream(current_caller(), operations)) as results:
            async for result in results:
                yield wire.TrainResponse(result=result_to_proto(result))

    async def GetOperation(  # noqa: N802 - the contract's name
        self, request: wire.GetOperationRequest, context: Context[Any, Any]
    ) -> wire.GetOperationResponse:
        """Look an operation up."""
        adapter_id = id_from_proto(request.adapter_id, 'adapter_id')
        record = await self._verbs.find_operation(current_caller(), adapter_id, request.sequence_number)
        state, result = record_to_proto(record, adapter_id, request.sequence_number)
        return wire.GetOperationResponse(state=state, result=result)

    async def WaitOperation(  # noqa: N802 - the contract's name
        self, request: wire.WaitOperationRequest, context: Context[Any, Any]
    ) -> wire.WaitOperationResponse:
        """Wait for an operation."""
        adapter_id = id_from_proto(request.adapter_id, 'adapter_id')
        patience = patience_from_proto(request)
        record = await self._verbs.find_operation(
            current_caller(), adapter_id, request.sequence_number, patience=patience
        )
        state, result = record_to_proto(record, adapter_id, request.sequence_number)
        return wire.WaitOperationResponse(state=state, result=result)

    async def _operations(self, requests: AsyncIterator[wire.TrainRequest]) -> AsyncIterator[Operation | Refused]:
        async for request in requests:
            message = request.operation
            try:
                yield operation_from_proto(message, 'operation', vocabulary_size=self._verbs.vocabulary_size)
            except DomainError as error:
                # In a stream a malformed operation fails alone.
                yield Refused(message.adapter_id, message.sequence_number, error)
