"""Lists the contracts that the gateway serves itself, and the contracts that it forwards."""

from collections.abc import Mapping, Sequence

from google.protobuf.descriptor import ServiceDescriptor

from services.gateway.catalogue.servicer import CatalogueServicer
from services.gateway.exports.servicer import ExportServicer
from services.gateway.fleet.servicer import FleetServicer
from services.gateway.keys.servicer import KeyServicer
from services.gateway.quotas.servicer import QuotaServicer
from services.gateway.sessions.servicer import SessionServicer
from services.kit.rpc.server import Endpoint
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, version_service_pb2
from twinkle.api.data.v1 import dataset_service_pb2, loader_service_pb2
from twinkle.api.gateway.v1 import (
    catalogue_service_pb2,
    catalogue_service_pb2_grpc,
    export_service_pb2,
    export_service_pb2_grpc,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    key_service_pb2,
    key_service_pb2_grpc,
    quota_service_pb2,
    quota_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)
from twinkle.api.model.v1 import adapter_service_pb2, training_service_pb2

FORWARDED: Mapping[str, Sequence[ServiceDescriptor]] = {
    'model': (
        adapter_service_pb2.DESCRIPTOR.services_by_name['AdapterService'],
        training_service_pb2.DESCRIPTOR.services_by_name['TrainingService'],
    ),
    'data': (
        dataset_service_pb2.DESCRIPTOR.services_by_name['DatasetService'],
        loader_service_pb2.DESCRIPTOR.services_by_name['LoaderService'],
    ),
    'checkpoint': (
        checkpoint_service_pb2.DESCRIPTOR.services_by_name['CheckpointService'],
        version_service_pb2.DESCRIPTOR.services_by_name['VersionService'],
    ),
}
"""Forwarded contracts by service behind the gateway. Weight streams are not forwarded, and sampling is served by the
fleet."""


def make_endpoints(
    *,
    keys: KeyServicer,
    quotas: QuotaServicer,
    sessions: SessionServicer,
    catalogue: CatalogueServicer,
    exports: ExportServicer,
    fleet: FleetServicer,
) -> list[Endpoint]:
    """Return the gateway's own endpoints. Sampling is not one of them, because its responses stay serialized."""
    return [
        Endpoint(
            key_service_pb2.DESCRIPTOR.services_by_name['KeyService'],
            keys,
            key_service_pb2_grpc.add_KeyServiceServicer_to_server,
        ),
        Endpoint(
            quota_service_pb2.DESCRIPTOR.services_by_name['QuotaService'],
            quotas,
            quota_service_pb2_grpc.add_QuotaServiceServicer_to_server,
        ),
        Endpoint(
            session_service_pb2.DESCRIPTOR.services_by_name['SessionService'],
            sessions,
            session_service_pb2_grpc.add_SessionServiceServicer_to_server,
        ),
        Endpoint(
            catalogue_service_pb2.DESCRIPTOR.services_by_name['CatalogueService'],
            catalogue,
            catalogue_service_pb2_grpc.add_CatalogueServiceServicer_to_server,
        ),
        Endpoint(
            export_service_pb2.DESCRIPTOR.services_by_name['ExportService'],
            exports,
            export_service_pb2_grpc.add_ExportServiceServicer_to_server,
        ),
        Endpoint(
            fleet_service_pb2.DESCRIPTOR.services_by_name['FleetService'],
            fleet,
            fleet_service_pb2_grpc.add_FleetServiceServicer_to_server,
        ),
    ]
