"""Constructs the handlers of forwarded calls and of sampling."""

from collections.abc import Mapping

import grpc

from services.gateway.config import GatewayConfig
from services.gateway.fleet.model_routes import MODEL, OneModel
from services.gateway.fleet.upstreams import Upstreams
from services.gateway.forwarding.admission import AdmittedCalls
from services.gateway.forwarding.by_model import ModelForwarder
from services.gateway.forwarding.bytes import Forwarder
from services.gateway.forwarding.endpoints import FORWARDED
from services.gateway.quotas.enforcement import TrainingLimits
from services.gateway.sampling.sampling import Sampling
from services.gateway.sampling.servicer import SamplerHandlers, SamplerServicer


def open_forwarding(
    config: GatewayConfig, upstreams: Upstreams, limits: TrainingLimits, *, sampling: Sampling
) -> dict[grpc.GenericRpcHandler, Mapping[str, bool]]:
    """Return the handlers of forwarded calls and of sampling, each with the methods that it serves."""
    token = config.internal_token
    forwarders: list[Forwarder | ModelForwarder] = [
        Forwarder(FORWARDED, channels=upstreams.channels, internal_token=token)
    ]
    if not isinstance(upstreams.routes, OneModel):
        others = {service: contracts for service, contracts in FORWARDED.items() if service != MODEL}
        forwarders = [
            Forwarder(others, channels=upstreams.channels, internal_token=token),
            ModelForwarder(FORWARDED[MODEL], channels=upstreams.models, routes=upstreams.routes, internal_token=token),
        ]
    patience = config.quotas.patience.total_seconds()
    samplers = SamplerHandlers(SamplerServicer(sampling))
    forwarded = {AdmittedCalls(item, limits, patience_seconds=patience): item.methods for item in forwarders}
    return {samplers: samplers.methods, **forwarded}
