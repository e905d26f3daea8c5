"""The services of the contract that this server offers."""

from services.checkpoint.api.servicer import CheckpointServicer, VersionServicer, WeightStreamServicer
from services.checkpoint.application.verbs import Verbs
from services.kit.rpc.server import Endpoint
from twinkle.api.checkpoint.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    version_service_pb2,
    version_service_pb2_grpc,
    weight_stream_service_pb2,
    weight_stream_service_pb2_grpc,
)


def make_endpoints(verbs: Verbs) -> list[Endpoint]:
    """Return the services of the contract over `verbs`."""
    return [
        Endpoint(
            weight_stream_service_pb2.DESCRIPTOR.services_by_name['WeightStreamService'],
            WeightStreamServicer(verbs),
            weight_stream_service_pb2_grpc.add_WeightStreamServiceServicer_to_server,
        ),
        Endpoint(
            version_service_pb2.DESCRIPTOR.services_by_name['VersionService'],
            VersionServicer(verbs),
            version_service_pb2_grpc.add_VersionServiceServicer_to_server,
        ),
        Endpoint(
            checkpoint_service_pb2.DESCRIPTOR.services_by_name['CheckpointService'],
            CheckpointServicer(verbs),
            checkpoint_service_pb2_grpc.add_CheckpointServiceServicer_to_server,
        ),
    ]
