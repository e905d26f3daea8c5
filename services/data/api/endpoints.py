"""The services of the contract, ready to be served."""

from services.data.api.servicer import DatasetServicer, LoaderServicer
from services.data.application.verbs import Verbs
from services.kit.rpc.server import Endpoint
from twinkle.api.data.v1 import (
    dataset_service_pb2,
    dataset_service_pb2_grpc,
    loader_service_pb2,
    loader_service_pb2_grpc,
)


def make_endpoints(verbs: Verbs) -> list[Endpoint]:
    """Return the services of the contract over `verbs`."""
    return [
        Endpoint(
            dataset_service_pb2.DESCRIPTOR.services_by_name['DatasetService'],
            DatasetServicer(verbs),
            dataset_service_pb2_grpc.add_DatasetServiceServicer_to_server,
        ),
        Endpoint(
            loader_service_pb2.DESCRIPTOR.services_by_name['LoaderService'],
            LoaderServicer(verbs),
            loader_service_pb2_grpc.add_LoaderServiceServicer_to_server,
        ),
    ]
