"""The two services of the contract. Each method converts, awaits its verb, and converts."""

# ruff: noqa: N802 (the methods have the contract's names)

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from services.data.api import convert, convert_loader
from services.data.application.verbs import Verbs
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto, not_negative
from twinkle.api.data.v1 import (
    dataset_service_pb2,
    dataset_service_pb2_grpc,
    loader_service_pb2,
    loader_service_pb2_grpc,
)

_Context = grpc.aio.ServicerContext[Any, Any]


class DatasetServicer(dataset_service_pb2_grpc.DatasetServiceServicer):
    """Makes and keeps datasets."""

    def __init__(self, verbs: Verbs) -> None:
        """Serve `verbs`."""
        self._verbs = verbs

    async def CreateDataset(
        self, request: dataset_service_pb2.CreateDatasetRequest, context: _Context
    ) -> dataset_service_pb2.CreateDatasetResponse:
        """Create a dataset."""
        order = convert.create_order_from_proto(request)
        dataset = await self._verbs.create_dataset(current_caller(), order)
        return dataset_service_pb2.CreateDatasetResponse(dataset=convert.dataset_to_proto(dataset))

    async def Upload(
        self, request_iterator: AsyncIterator[dataset_service_pb2.UploadRequest], context: _Context
    ) -> dataset_service_pb2.UploadResponse:
        """Take a file."""
        parts = convert.upload_parts_from_proto(request_iterator)
        return convert.upload_to_proto(await self._verbs.uploads.receive(current_caller(), parts))

    async def GetUpload(
        self, request: dataset_service_pb2.GetUploadRequest, context: _Context
    ) -> dataset_service_pb2.GetUploadResponse:
        """Say where to resume."""
        upload_id = id_from_proto(request.upload_id, 'upload_id')
        status = await self._verbs.uploads.get(current_caller(), upload_id)
        return dataset_service_pb2.GetUploadResponse(
            committed_bytes=status.committed_bytes, is_complete=status.is_complete
        )

    async def Apply(
        self, request: dataset_service_pb2.ApplyRequest, context: _Context
    ) -> dataset_service_pb2.ApplyResponse:
        """Apply steps."""
        order = convert.apply_order_from_proto(request)
        dataset = await self._verbs.apply_steps(current_caller(), order)
        return dataset_service_pb2.ApplyResponse(dataset=convert.dataset_to_proto(dataset))

    async def GetDataset(
        self, request: dataset_service_pb2.GetDatasetRequest, context: _Context
    ) -> dataset_service_pb2.GetDatasetResponse:
        """Return a dataset."""
        dataset_id = id_from_proto(request.dataset_id, 'dataset_id')
        dataset = await self._verbs.get_dataset(current_caller(), dataset_id)
        return dataset_service_pb2.GetDatasetResponse(dataset=convert.dataset_to_proto(dataset))

    async def ListDatasets(
        self, request: dataset_service_pb2.ListDatasetsRequest, context: _Context
    ) -> dataset_service_pb2.ListDatasetsResponse:
        """Return a page of datasets."""
        caller = current_caller()
        page = convert.page_from_proto(caller, request)
        datasets, after = await self._verbs.list_datasets(caller, page)
        return convert.page_to_proto(caller, datasets, after)

    async def DeleteDataset(
        self, request: dataset_service_pb2.DeleteDatasetRequest, context: _Context
    ) -> dataset_service_pb2.DeleteDatasetResponse:
        """Delete a dataset."""
        dataset_id = id_from_proto(request.dataset_id, 'dataset_id')
        await self._verbs.delete_dataset(current_caller(), dataset_id)
        return dataset_service_pb2.DeleteDatasetResponse()

    async def ExportDataset(
        self, request: dataset_service_pb2.ExportDatasetRequest, context: _Context
    ) -> AsyncIterator[dataset_service_pb2.ExportDatasetResponse]:
        """Send a dataset as a file."""
        dataset_id = id_from_proto(request.dataset_id, 'dataset_id')
        file_format = convert.format_from_proto(request.format, 'format')
        offset = not_negative(request.offset, 'offset')
        pieces = self._verbs.export_dataset(current_caller(), dataset_id, file_format=file_format, offset=offset)
        async with aclosing(pieces):
            async for piece in pieces:
                yield convert.piece_to_proto(piece)


class LoaderServicer(loader_service_pb2_grpc.LoaderServiceServicer):
    """Reads datasets batch by batch."""

    def __init__(self, verbs: Verbs) -> None:
        """Serve `verbs`."""
        self._verbs = verbs

    async def OpenLoader(
        self, request: loader_service_pb2.OpenLoaderRequest, context: _Context
    ) -> loader_service_pb2.OpenLoaderResponse:
        """Open a loader."""
        order = convert_loader.loader_order_from_proto(request)
        loader = await self._verbs.open_loader(current_caller(), order)
        return loader_service_pb2.OpenLoaderResponse(loader=convert_loader.loader_to_proto(loader))

    async def StreamBatches(
        self, request_iterator: AsyncIterator[loader_service_pb2.StreamBatchesRequest], context: _Context
    ) -> AsyncIterator[loader_service_pb2.StreamBatchesResponse]:
        """Send batches as credits allow."""
        requests = convert_loader.stream_requests_from_proto(request_iterator)
        async with aclosing(self._verbs.stream_batches(current_caller(), requests)) as batches:
            async for item in batches:
                yield convert_loader.batch_to_proto(item)

    async def CloseLoader(
        self, request: loader_service_pb2.CloseLoaderRequest, context: _Context
    ) -> loader_service_pb2.CloseLoaderResponse:
        """Close a loader."""
        loader_id = id_from_proto(request.loader_id, 'loader_id')
        await self._verbs.close_loader(current_caller(), loader_id)
        return loader_service_pb2.CloseLoaderResponse()
