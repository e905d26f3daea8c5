"""The gRPC services of this server."""

from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    training_service_pb2,
    training_service_pb2_grpc,
)
from twinkle_services.kit.rpc.server import Endpoint
from twinkle_services.model.api.adapter_servicer import AdapterServicer
from twinkle_services.model.api.training_servicer import TrainingServicer
from twinkle_services.model.application.service import ModelService


def make_endpoints(service: ModelService) -> list[Endpoint]:
    adapters = AdapterServicer(service)  # pyright: ignore[reportAbstractUsage] (the kit handles unsupported methods)
    training = TrainingServicer(service)  # pyright: ignore[reportAbstractUsage] (as above)
    return [
        Endpoint(
            adapter_service_pb2.DESCRIPTOR.services_by_name['AdapterService'],
            adapters,
            adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server,
        ),
        Endpoint(
            training_service_pb2.DESCRIPTOR.services_by_name['TrainingService'],
            training,
            training_service_pb2_grpc.add_TrainingServiceServicer_to_server,
        ),
    ]
