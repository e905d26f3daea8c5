"""Servicers of the data service. Each method converts the request, calls the application, and converts the result."""

# ruff: noqa: N802 (the contract names and describes the methods)

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from twinkle.api.data.v1 import (
    dataset_service_pb2,
    dataset_service_pb2_grpc,
    loader_service_pb2,
    loader_service_pb2_grpc,
)
from twinkle_services.data.api import convert, convert_loader
from twinkle_services.data.application.datasets import Datasets
from twinkle_services.data.application.loaders import Loaders
from twinkle_services.data.application.uploads import Uploads
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto, not_negative
from twinkle_services.kit.rpc.message_bounds import convert_large
from twinkle_services.kit.rpc.server import Endpoint


class DatasetServicer(dataset_service_pb2_grpc.DatasetServiceServicer):
    """Serves datasets and uploads."""

    def __init__(self, datasets: Datasets, uploads: Uploads) -> None:
        self._datasets, self._uploads = datasets, uploads

    async def CreateDataset(
        self, request: dataset_service_pb2.CreateDatasetRequest, context: Context
    ) -> dataset_service_pb2.CreateDatasetResponse:
        converted = await convert_large(convert.create_request_from_proto, request)
        dataset = await self._datasets.create(current_caller(), converted)
        return dataset_service_pb2.CreateDatasetResponse(dataset=convert.dataset_to_proto(dataset))

    async def Upload(
        self, request_iterator: AsyncIterator[dataset_service_pb2.UploadRequest], context: Context
    ) -> dataset_service_pb2.UploadResponse:
        parts = convert.upload_parts_from_proto(request_iterator)
        return convert.upload_to_proto(await self._uploads.receive(current_caller(), parts))

    async def GetUpload(
        self, request: dataset_service_pb2.GetUploadRequest, context: Context
    ) -> dataset_service_pb2.GetUploadResponse:
        upload_id = id_from_proto(request.upload_id, 'upload_id')
        status = await self._uploads.get(current_caller(), upload_id)
        return dataset_service_pb2.GetUploadResponse(
            committed_bytes=status.committed_bytes, is_complete=status.is_complete
        )

    async def Apply(
        self, request: dataset_service_pb2.ApplyRequest, context: Context
    ) -> dataset_service_pb2.ApplyResponse:
        converted = await convert_large(convert.apply_request_from_proto, request)
        dataset = await self._datasets.apply(current_caller(), converted)
        return dataset_service_pb2.ApplyResponse(dataset=convert.dataset_to_proto(dataset))

    async def GetDataset(
        self, request: dataset_service_pb2.GetDatasetRequest, context: Context
    ) -> dataset_service_pb2.GetDatasetResponse:
        dataset_id = id_from_proto(request.dataset_id, 'dataset_id')
        dataset = await self._datasets.get(current_caller(), dataset_id)
        return dataset_service_pb2.GetDatasetResponse(dataset=convert.dataset_to_proto(dataset))

    async def ListDatasets(
        self, request: dataset_service_pb2.ListDatasetsRequest, context: Context
    ) -> dataset_service_pb2.ListDatasetsResponse:
        caller = current_caller()
        page = convert.page_from_proto(caller, request)
        datasets, after = await self._datasets.list(caller, page)
        return convert.page_to_proto(caller, datasets, after)

    async def PeekRows(
        self, request: dataset_service_pb2.PeekRowsRequest, context: Context
    ) -> dataset_service_pb2.PeekRowsResponse:
        dataset_id = id_from_proto(request.dataset_id, 'dataset_id')
        begin, count = not_negative(request.begin_row, 'begin_row'), convert.row_count_from_proto(request)
        rows = await self._datasets.peek(current_caller(), dataset_id, begin=begin, count=count)
        return await asyncio.to_thread(convert_loader.peeked_to_proto, rows)

    async def GetStoredBytes(
        self, request: dataset_service_pb2.GetStoredBytesRequest, context: Context
    ) -> dataset_service_pb2.GetStoredBytesResponse:
        dataset_bytes, upload_bytes = await self._datasets.stored_bytes(current_caller())
        return dataset_service_pb2.GetStoredBytesResponse(dataset_bytes=dataset_bytes, upload_bytes=upload_bytes)

    async def DeleteDataset(
        self, request: dataset_service_pb2.DeleteDatasetRequest, context: Context
    ) -> dataset_service_pb2.DeleteDatasetResponse:
        dataset_id = id_from_proto(request.dataset_id, 'dataset_id')
        await self._datasets.delete(current_caller(), dataset_id)
        return dataset_service_pb2.DeleteDatasetResponse()

    async def ExportDataset(
        self, request: dataset_service_pb2.ExportDatasetRequest, context: Context
    ) -> AsyncIterator[dataset_service_pb2.ExportDatasetResponse]:
        dataset_id = id_from_proto(request.dataset_id, 'dataset_id')
        file_format = convert.format_from_proto(request.format, 'format')
        offset = not_negative(request.offset, 'offset')
        pieces = self._datasets.export(current_caller(), dataset_id, file_format=file_format, offset=offset)
        async with aclosing(pieces):
            async for piece in pieces:
                yield convert.piece_to_proto(piece)


class LoaderServicer(loader_service_pb2_grpc.LoaderServiceServicer):
    """Serves loaders and their batches."""

    def __init__(self, loaders: Loaders) -> None:
        self._loaders = loaders

    async def OpenLoader(
        self, request: loader_service_pb2.OpenLoaderRequest, context: Context
    ) -> loader_service_pb2.OpenLoaderResponse:
        loader = await self._loaders.open(current_caller(), convert_loader.open_request_from_proto(request))
        return loader_service_pb2.OpenLoaderResponse(loader=convert_loader.loader_to_proto(loader))

    async def StreamBatches(
        self, request_iterator: AsyncIterator[loader_service_pb2.StreamBatchesRequest], context: Context
    ) -> AsyncIterator[loader_service_pb2.StreamBatchesResponse]:
        requests = convert_loader.stream_requests_from_proto(request_iterator)
        async with aclosing(self._loaders.stream(current_caller(), requests)) as batches:
            async for item in batches:
                yield convert_loader.batch_to_proto(item)

    async def CloseLoader(
        self, request: loader_service_pb2.CloseLoaderRequest, context: Context
    ) -> loader_service_pb2.CloseLoaderResponse:
        loader_id = id_from_proto(request.loader_id, 'loader_id')
        await self._loaders.close(current_caller(), loader_id)
        return loader_service_pb2.CloseLoaderResponse()


def make_endpoints(datasets: DatasetServicer, loaders: LoaderServicer) -> list[Endpoint]:
    return [
        Endpoint(
            dataset_service_pb2.DESCRIPTOR.services_by_name['DatasetService'],
            datasets,
            dataset_service_pb2_grpc.add_DatasetServiceServicer_to_server,
        ),
        Endpoint(
            loader_service_pb2.DESCRIPTOR.services_by_name['LoaderService'],
            loaders,
            loader_service_pb2_grpc.add_LoaderServiceServicer_to_server,
        ),
    ]
