"""The services of the contract that this server offers."""

from services.checkpoint.api.servicer import CheckpointServicer, VersionServicer, WeightStreamServicer
from services.checkpoint.application.verbs import Verbs
from services.kit.rpc.server import Endpoint
from services.kit.rpc.weights import add_weight_stream
from twinkle.api.checkpoint.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    version_service_pb2,
    version_service_pb2_grpc,
    weight_stream_service_pb2,
)


def make_endpoints(verbs: Verbs) -> list[Endpoint]:
    """Return the services of the contract over `verbs`."""
    return [
        Endpoint(
            weight_stream_service_pb2.DESCRIPTOR.services_by_name['WeightStreamService'],
            WeightStreamServicer(verbs),
            add_weight_stream,
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
