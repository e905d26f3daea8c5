"""The services of the contract that this server offers."""

from services.kit.rpc.server import Endpoint
from services.kit.rpc.weights import add_weight_stream
from services.sampler.api.servicer import SamplerServicer
from services.sampler.api.weight_servicer import WeightServicer
from services.sampler.application.verbs import Verbs
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2, sampler_service_pb2_grpc


def make_endpoints(verbs: Verbs) -> list[Endpoint]:
    """Return the services of the contract over `verbs`."""
    return [
        Endpoint(
            sampler_service_pb2.DESCRIPTOR.services_by_name['SamplerService'],
            SamplerServicer(verbs),
            sampler_service_pb2_grpc.add_SamplerServiceServicer_to_server,
        ),
        Endpoint(
            weight_stream_service_pb2.DESCRIPTOR.services_by_name['WeightStreamService'],
            WeightServicer(verbs.relay),  # pyright: ignore[reportAbstractUsage] (Publish is not served here)
            add_weight_stream,
        ),
    ]
