"""Single calls of other services, for the APIs that have no stubs of their own: what is there, what may go."""

from __future__ import annotations

from typing import Any, cast

import grpc

from services.gateway.forwarding.model_channels import ModelChannels
from services.kit.errors import ServiceUnreachable
from services.kit.rpc.channel import forwarded_metadata
from services.kit.rpc.context import current_caller
from services.kit.rpc.status import error_from_call
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, version_service_pb2
from twinkle.api.model.v1 import adapter_service_pb2

_PATIENCE_SECONDS = 30.0


class GrpcLookups:
    """Asks on behalf of the current caller. Every verb raises the service's own error, or ServiceUnreachable."""

    def __init__(
        self, models: ModelChannels | None, checkpoint: grpc.aio.Channel | None, *, internal_token: str
    ) -> None:
        """Ask model services and, over a bare channel, the checkpoint service; None: not part of this deployment."""
        self._models = models
        self._checkpoint = checkpoint
        self._internal_token = internal_token

    async def adapter(self, adapter_id: str) -> bytes:
        """Return an adapter, as model.v1.Adapter."""
        request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
        method = 'twinkle.api.model.v1.AdapterService/GetAdapter'
        if self._models is None:
            raise ServiceUnreachable('model')
        channel = await self._models.of_adapter(current_caller().tenant_id, adapter_id)
        raw = await self._call(channel, 'model', method, request.SerializeToString())
        return adapter_service_pb2.GetAdapterResponse.FromString(raw).adapter.SerializeToString()

    async def checkpoint(self, checkpoint_path: str) -> bytes:
        """Return a checkpoint by its path, as checkpoint.v1.Checkpoint."""
        request = checkpoint_service_pb2.GetCheckpointRequest(checkpoint_path=checkpoint_path)
        method = 'twinkle.api.checkpoint.v1.CheckpointService/GetCheckpoint'
        raw = await self._call(self._checkpoint, 'checkpoint', method, request.SerializeToString())
        return checkpoint_service_pb2.GetCheckpointResponse.FromString(raw).checkpoint.SerializeToString()

    async def unpin(self, adapter_id: str, version: int) -> None:
        """Let a version leave the ring in its turn."""
        request = version_service_pb2.UnpinVersionRequest(adapter_id=adapter_id, version=version)
        method = 'twinkle.api.checkpoint.v1.VersionService/UnpinVersion'
        await self._call(self._checkpoint, 'checkpoint', method, request.SerializeToString())

    async def _call(self, channel: grpc.aio.Channel | None, service: str, method: str, request: bytes) -> bytes:
        if channel is None:
            raise ServiceUnreachable(service)
        call = cast(Any, channel).unary_unary(f'/{method}')
        try:
            response: bytes = await call(
                request, timeout=_PATIENCE_SECONDS, metadata=forwarded_metadata(self._internal_token)
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service=service) from error
        return response
