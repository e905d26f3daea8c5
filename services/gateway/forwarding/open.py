"""Handlers of all gRPC contracts: those that the gateway serves itself, and those that it forwards."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, version_service_pb2
from twinkle.api.data.v1 import dataset_service_pb2, loader_service_pb2
from twinkle.api.gateway.v1 import (
    catalogue_service_pb2,
    export_service_pb2,
    fleet_service_pb2,
    key_service_pb2,
    metric_service_pb2,
    quota_service_pb2,
    rollout_service_pb2,
    session_service_pb2,
    trace_service_pb2,
)
from twinkle.api.gateway.v1.catalogue_service_pb2_grpc import add_CatalogueServiceServicer_to_server
from twinkle.api.gateway.v1.export_service_pb2_grpc import add_ExportServiceServicer_to_server
from twinkle.api.gateway.v1.fleet_service_pb2_grpc import add_FleetServiceServicer_to_server
from twinkle.api.gateway.v1.key_service_pb2_grpc import add_KeyServiceServicer_to_server
from twinkle.api.gateway.v1.metric_service_pb2_grpc import add_MetricServiceServicer_to_server
from twinkle.api.gateway.v1.quota_service_pb2_grpc import add_QuotaServiceServicer_to_server
from twinkle.api.gateway.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from twinkle.api.gateway.v1.session_service_pb2_grpc import add_SessionServiceServicer_to_server
from twinkle.api.gateway.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server
from twinkle.api.model.v1 import adapter_service_pb2, training_service_pb2
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle_services.gateway.catalogue.checkpoints import Catalogue
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.credentials import Access, requirement_of
from twinkle_services.gateway.exports.exports import Exports
from twinkle_services.gateway.exports.servicer import ExportServicer
from twinkle_services.gateway.fleet.model_routes import MODEL
from twinkle_services.gateway.fleet.replicas import Replicas
from twinkle_services.gateway.fleet.servicer import FleetServicer
from twinkle_services.gateway.fleet.upstreams import ServiceFacts, Upstreams
from twinkle_services.gateway.forwarding.admission import QuotaAdmission
from twinkle_services.gateway.forwarding.by_model import model_handler
from twinkle_services.gateway.forwarding.bytes import ForwardedMethod
from twinkle_services.gateway.keys.keys import Accounts
from twinkle_services.gateway.keys.servicer import KeyServicer
from twinkle_services.gateway.metrics.metrics import Metrics
from twinkle_services.gateway.metrics.servicer import MetricServicer
from twinkle_services.gateway.metrics.watches import MetricWatches
from twinkle_services.gateway.quotas.enforcement import TrainingLimits
from twinkle_services.gateway.quotas.quotas import Quotas
from twinkle_services.gateway.quotas.servicer import QuotaServicer, UsageServicer
from twinkle_services.gateway.rollouts.rollouts import Rollouts
from twinkle_services.gateway.rollouts.servicer import RolloutServicer
from twinkle_services.gateway.sampling.sampling import Sampling
from twinkle_services.gateway.sampling.servicer import sampler_handlers
from twinkle_services.gateway.sessions.servicer import SessionServicer
from twinkle_services.gateway.sessions.sessions import Sessions
from twinkle_services.gateway.traces.index import TraceIndex
from twinkle_services.gateway.traces.servicer import TraceServicer
from twinkle_services.gateway.traces.traces import Traces
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.server import Endpoint
from twinkle_services.kit.rpc.server_info import CONTRACT_VERSION


def _service_in(contract: Any) -> ServiceDescriptor:
    """Return the only service of a generated module."""
    (service,) = contract.DESCRIPTOR.services_by_name.values()
    return service


FORWARDED: Mapping[str, Sequence[ServiceDescriptor]] = {
    'model': (_service_in(adapter_service_pb2), _service_in(training_service_pb2)),
    'data': (_service_in(dataset_service_pb2), _service_in(loader_service_pb2)),
    'checkpoint': (_service_in(checkpoint_service_pb2), _service_in(version_service_pb2)),
}
"""Forwarded contracts by service behind the gateway. Streams of weights are not forwarded, and `sampling` serves the
contract for sampling."""


def make_endpoints(
    accounts: Accounts,
    sessions: Sessions,
    catalogue: Catalogue,
    quotas: Quotas,
    *,
    exports: Exports,
    replicas: Replicas,
) -> list[Endpoint]:
    """Return the gateway's own endpoints. Sampling is not among them, because its responses stay serialized."""
    keys = KeyServicer(accounts.tenants, accounts.projects, accounts.keys)
    runs = UsageServicer(quotas, catalogue.runs, catalogue.checkpoints)
    return [
        Endpoint(_service_in(key_service_pb2), keys, add_KeyServiceServicer_to_server),
        Endpoint(_service_in(quota_service_pb2), QuotaServicer(quotas), add_QuotaServiceServicer_to_server),
        Endpoint(_service_in(session_service_pb2), SessionServicer(sessions), add_SessionServiceServicer_to_server),
        Endpoint(_service_in(catalogue_service_pb2), runs, add_CatalogueServiceServicer_to_server),
        Endpoint(_service_in(export_service_pb2), ExportServicer(exports), add_ExportServiceServicer_to_server),
        Endpoint(_service_in(fleet_service_pb2), FleetServicer(replicas), add_FleetServiceServicer_to_server),
    ]


def record_endpoints(metrics: Metrics, watches: MetricWatches, rollouts: Rollouts) -> list[Endpoint]:
    """Return the endpoints for the metrics and rollouts of runs."""
    servicer = MetricServicer(metrics, watches)
    return [
        Endpoint(_service_in(metric_service_pb2), servicer, add_MetricServiceServicer_to_server),
        Endpoint(_service_in(rollout_service_pb2), RolloutServicer(rollouts), add_RolloutServiceServicer_to_server),
    ]


def trace_endpoint(config: GatewayConfig) -> Endpoint:
    """Return the endpoint for the traces in the folder of the configuration."""
    folder = config.telemetry.trace_dir
    traces = Traces(TraceIndex(folder) if folder is not None else None)
    return Endpoint(_service_in(trace_service_pb2), TraceServicer(traces), add_TraceServiceServicer_to_server)


def open_forwarding(
    config: GatewayConfig, upstreams: Upstreams, limits: TrainingLimits, *, sampling: Sampling
) -> dict[grpc.GenericRpcHandler, Mapping[str, bool]]:
    """Return a handler for each contract of forwarded calls and of sampling, with the methods that it serves."""
    admission = QuotaAdmission(limits, patience_seconds=config.quotas.patience.total_seconds())
    handlers = defaultdict[str, dict[str, Any]](dict, sampler_handlers(sampling))
    for service, method in _forwarded_methods():
        routes = upstreams.routes if service == MODEL else None
        forwarded = ForwardedMethod(
            method,
            upstreams.channels_to(service),
            kind=service,
            internal_token=config.internal_token,
            admit=admission.by_method.get(method.full_name),
        )
        handler = forwarded.handler() if routes is None else model_handler(forwarded, routes)
        handlers[method.containing_service.full_name][method.name] = handler
    return {
        grpc.method_handlers_generic_handler(contract, methods): {f'{contract}/{name}': True for name in methods}
        for contract, methods in handlers.items()
    }


def _forwarded_methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Yield the methods that clients may call, each with the kind of the service that has the method."""
    for service, contracts in FORWARDED.items():
        for method in (method for contract in contracts for method in contract.methods):
            if requirement_of(f'{method.containing_service.full_name}/{method.name}') is not Access.INTERNAL:
                yield service, method


class MergedServerInfoServicer(server_service_pb2_grpc.ServerServiceServicer):
    """Describes the gateway, followed by the services behind it in the order of `upstreams`."""

    def __init__(self, *, own: Callable[[], server_service_pb2.ServiceInfo], upstreams: Sequence[ServiceFacts]) -> None:
        self._own = own
        self._upstreams = tuple(upstreams)

    async def GetServerInfo(  # noqa: N802 (the contract's name)
        self, request: server_service_pb2.GetServerInfoRequest, context: Context
    ) -> server_service_pb2.GetServerInfoResponse:
        others = await asyncio.gather(*(upstream.describe() for upstream in self._upstreams))
        own = self._own()
        _copy_support(own, others)
        response = server_service_pb2.GetServerInfoResponse(contract_version=CONTRACT_VERSION, services=[own, *others])
        for service in response.services:
            # Clients must not see the journals and the load of the model services.
            service.ClearField('trainer')
        return response


def _copy_support(own: server_service_pb2.ServiceInfo, others: Sequence[server_service_pb2.ServiceInfo]) -> None:
    """Update `is_supported` in `own`: a method that `others` also list is supported if one of them supports it."""
    support: dict[str, bool] = {}
    for item in (item for info in others for item in info.methods):
        support[item.method] = support.get(item.method, False) or item.is_supported
    for item in own.methods:
        if not item.method.startswith('twinkle.api.server.'):
            item.is_supported = support.get(item.method, item.is_supported)
