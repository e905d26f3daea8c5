"""Defines the gRPC services that a sampler offers."""

from twinkle.api.checkpoint.v1 import weight_stream_service_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2, sampler_service_pb2_grpc
from twinkle_services.kit.rpc.server import Endpoint
from twinkle_services.kit.weights.wire import add_weight_stream
from twinkle_services.sampler.api.servicer import SamplerServicer
from twinkle_services.sampler.api.weight_servicer import WeightServicer
from twinkle_services.sampler.application.engine_control import EngineControl
from twinkle_services.sampler.application.relay import Relay
from twinkle_services.sampler.application.resident_adapters import ResidentAdapters
from twinkle_services.sampler.application.sampling import Sampling


def make_endpoints(
    sampling: Sampling, control: EngineControl, adapters: ResidentAdapters, relay: Relay
) -> list[Endpoint]:
    return [
        Endpoint(
            sampler_service_pb2.DESCRIPTOR.services_by_name['SamplerService'],
            SamplerServicer(sampling, control, adapters),
            sampler_service_pb2_grpc.add_SamplerServiceServicer_to_server,
        ),
        Endpoint(
            weight_stream_service_pb2.DESCRIPTOR.services_by_name['WeightStreamService'],
            WeightServicer(relay),  # pyright: ignore[reportAbstractUsage] (Publish is not served here)
            add_weight_stream,
        ),
    ]
