"""A model service that does nothing but answer: what is measured through it is the way there and back."""

import asyncio
from typing import Any, ClassVar

from services.kit.config import ServiceConfig, load_config
from services.kit.rpc.auth import InternalAuthenticator
from services.kit.rpc.server import Endpoint, RpcServer, serve_until_stopped
from services.kit.telemetry import start_telemetry
from twinkle.api.model.v1 import adapter_service_pb2, adapter_service_pb2_grpc


class IdleModelConfig(ServiceConfig):
    """Configuration like that of the real service."""

    service: ClassVar[str] = 'model'


class IdleAdapters(adapter_service_pb2_grpc.AdapterServiceServicer):
    """Answers GetAdapter with the id it was asked for."""

    async def GetAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802 (the contract's name)
        """Answer at once."""
        response = adapter_service_pb2.GetAdapterResponse()
        response.adapter.adapter_id = request.adapter_id
        return response


async def run(config: IdleModelConfig) -> None:
    """Serve until asked to stop."""
    endpoint = Endpoint(
        adapter_service_pb2.DESCRIPTOR.services_by_name['AdapterService'],
        IdleAdapters(),
        adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server,
    )
    server = RpcServer(config, authenticator=InternalAuthenticator(config.internal_token), endpoints=[endpoint])
    await serve_until_stopped(server, config)


if __name__ == '__main__':
    configuration = load_config(IdleModelConfig)
    start_telemetry(configuration.telemetry, service=configuration.service)
    asyncio.run(run(configuration))
