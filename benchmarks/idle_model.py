"""A model service that responds immediately without computing, so that benchmarks measure only the transport."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from twinkle.api.model.v1 import adapter_service_pb2, adapter_service_pb2_grpc
from twinkle_services.kit.config import ServiceConfig, load_config
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.server import Endpoint, RpcServer, serve_until_stopped
from twinkle_services.kit.server_facts import BaseModelFacts, ServerFacts
from twinkle_services.kit.telemetry import start_telemetry


class IdleModelConfig(ServiceConfig):
    """Configuration with the fields of the real service that the benchmarks need."""

    service: ClassVar[str] = 'model'

    base_model: str = 'idle'
    """Base model that the service reports."""
    adapter_id: str = ''
    """Adapter in the stream of `WatchAdapters`; empty for no adapter."""


class IdleAdapters(adapter_service_pb2_grpc.AdapterServiceServicer):
    """Responds to GetAdapter with the requested id, and to WatchAdapters with the configured adapter."""

    def __init__(self, config: IdleModelConfig) -> None:
        self._config = config

    async def GetAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802 (name in the contract)
        """Return an adapter with the requested id."""
        response = adapter_service_pb2.GetAdapterResponse()
        response.adapter.adapter_id = request.adapter_id
        return response

    async def WatchAdapters(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 (name in the contract)
        """Yield the configured adapter, if any, and `is_synced`; then wait until cancelled."""
        if self._config.adapter_id:
            event = adapter_service_pb2.WatchAdaptersResponse(tenant_id='default')
            event.adapter.adapter_id, event.adapter.base_model = self._config.adapter_id, self._config.base_model
            event.adapter.create_time.GetCurrentTime()
            event.adapter.update_time.GetCurrentTime()
            yield event
        yield adapter_service_pb2.WatchAdaptersResponse(is_synced=True)
        await asyncio.Event().wait()


async def run(config: IdleModelConfig) -> None:
    """Serve until the process receives a stop signal."""
    endpoint = Endpoint(
        adapter_service_pb2.DESCRIPTOR.services_by_name['AdapterService'],
        IdleAdapters(config),
        adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server,
    )
    sizes = {'context_tokens': 1, 'vocabulary_size': 1, 'parameter_count': 1}
    base_model_facts = BaseModelFacts(base_model=config.base_model, dtype='float32', is_trainable=True, **sizes)
    server = RpcServer(
        config,
        authenticator=InternalAuthenticator(config.internal_token),
        endpoints=[endpoint],
        facts=lambda: ServerFacts(base_models=[base_model_facts]),
    )
    await serve_until_stopped(server, config)


if __name__ == '__main__':
    configuration = load_config(IdleModelConfig)
    start_telemetry(configuration.telemetry, service=configuration.service)
    asyncio.run(run(configuration))
