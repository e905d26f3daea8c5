"""Defines the gRPC services that this server offers."""

from twinkle.api.checkpoint.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    version_service_pb2,
    version_service_pb2_grpc,
    weight_stream_service_pb2,
)
from twinkle_services.checkpoint.api.servicer import CheckpointServicer, VersionServicer, WeightStreamServicer
from twinkle_services.kit.rpc.server import Endpoint
from twinkle_services.kit.weights.wire import add_weight_stream


def make_endpoints(
    weights: WeightStreamServicer, versions: VersionServicer, checkpoints: CheckpointServicer
) -> list[Endpoint]:
    return [
        Endpoint(
            weight_stream_service_pb2.DESCRIPTOR.services_by_name['WeightStreamService'],
            weights,
            add_weight_stream,
        ),
        Endpoint(
            version_service_pb2.DESCRIPTOR.services_by_name['VersionService'],
            versions,
            version_service_pb2_grpc.add_VersionServiceServicer_to_server,
        ),
        Endpoint(
            checkpoint_service_pb2.DESCRIPTOR.services_by_name['CheckpointService'],
            checkpoints,
            checkpoint_service_pb2_grpc.add_CheckpointServiceServicer_to_server,
        ),
    ]
