"""Datasets and uploads count toward a tenant's quota of stored bytes."""

from pathlib import Path
from typing import Any

from fixtures.data_service import iterate, new_request_id, rows, serving_data, upload_chunk, upload_header
from fixtures.running_gateway import ADMIN, RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.data.v1 import dataset_service_pb2 as wire
from twinkle.api.data.v1 import dataset_service_pb2_grpc
from twinkle.api.gateway.v1 import (
    catalogue_service_pb2,
    catalogue_service_pb2_grpc,
    quota_service_pb2,
    quota_service_pb2_grpc,
)

EXCEEDED = ('QUOTA_EXCEEDED', {'quota': 'stored_bytes', 'limit': '5000'})


async def stored_bytes(gateway: RunningGateway, metadata: Any) -> dict[str, int]:
    """Return the stored bytes of the caller by run."""
    stub = catalogue_service_pb2_grpc.CatalogueServiceStub(gateway.channel)
    response = await stub.GetUsage(catalogue_service_pb2.GetUsageRequest(), metadata=metadata)
    return {usage.run_id: usage.stored_bytes for usage in response.usages}


async def test_datasets_and_uploads_count_as_stored_bytes(tmp_path: Path) -> None:
    """A tenant at its limit cannot create or change a dataset, or upload a file, until it deletes enough data."""
    async with (
        serving_data(tmp_path / 'data') as data,
        running_gateway(tmp_path, data=data.address, internal_token='') as gateway,
    ):
        metadata = bearer((await gateway.make_key('alice')).secret)
        quota = quota_service_pb2.SetQuotaRequest(tenant_id='alice', quota=quota_service_pb2.Quota(stored_bytes=5000))
        await quota_service_pb2_grpc.QuotaServiceStub(gateway.channel).SetQuota(quota, metadata=ADMIN)
        stub = dataset_service_pb2_grpc.DatasetServiceStub(gateway.channel)

        def create(size: int) -> Any:
            source = rows({'x': 'x' * size})
            return stub.CreateDataset(
                wire.CreateDatasetRequest(request_id=new_request_id(), source=source), metadata=metadata
            )

        assert await stored_bytes(gateway, metadata) == {}
        small, large = (await create(100)).dataset, (await create(6000)).dataset
        assert (await stored_bytes(gateway, metadata))[''] > 6000
        failed = await failure_of(create(1))
        assert (failed.reason, failed.metadata) == EXCEEDED
        apply = wire.ApplyRequest(request_id=new_request_id(), dataset_id=small.dataset_id)
        assert (await failure_of(stub.Apply(apply, metadata=metadata))).reason == 'QUOTA_EXCEEDED'
        parts = [upload_header('u', 4900), upload_chunk(0, b'x' * 10)]
        assert (await failure_of(stub.Upload(iterate(parts), metadata=metadata))).reason == 'QUOTA_EXCEEDED'
        await stub.DeleteDataset(wire.DeleteDatasetRequest(dataset_id=large.dataset_id), metadata=metadata)
        await stub.Upload(iterate(parts), metadata=metadata)
        assert (await failure_of(create(1))).reason == 'QUOTA_EXCEEDED'
