"""Defines the gRPC services that a sampler offers."""

from services.kit.rpc.server import Endpoint
from services.kit.weights.wire import add_weight_stream
from services.sampler.api.servicer import SamplerServicer
from services.sampler.api.weight_servicer import WeightServicer
from services.sampler.application.engine_control import EngineControl
from services.sampler.application.relay import Relay
from services.sampler.application.resident_adapters import ResidentAdapters
from services.sampler.application.sampling import Sampling
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2, sampler_service_pb2_grpc


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
