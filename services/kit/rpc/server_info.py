"""Implements ServerService, with which every service describes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata

from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.server_facts import ServerFacts

CONTRACT_VERSION = 'v1'


def software_version() -> str:
    """Return the installed version of Twinkle."""
    return metadata.version('twinkle-grpc')


class ServerInfoServicer(server_service_pb2_grpc.ServerServiceServicer):
    """Describes one service."""

    def __init__(
        self,
        service: str,
        *,
        facts: Callable[[], ServerFacts],
        methods: Mapping[str, bool],
        limits: server_service_pb2.Limits,
    ) -> None:
        """Create a servicer.

        Args:
            service: Name of the service.
            facts: Returns the current facts; called for each request.
            methods: Whether each method is implemented, by full name without a leading slash.
            limits: Message and queue limits; the facts add further limits.
        """
        self._service = service
        self._facts = facts
        self._methods = methods
        self._limits = limits

    def describe(self) -> server_service_pb2.ServiceInfo:
        """Return the description of this service."""
        facts = self._facts()
        info = server_service_pb2.ServiceInfo(
            service=self._service, version=software_version(), is_reachable=True, limits=self._limits
        )
        info.limits.batch_tokens = facts.batch_tokens
        info.limits.lora_rank = facts.lora_rank
        info.engine_version = facts.engine_version
        for method in sorted(self._methods):
            info.methods.add(method=method, is_supported=self._methods[method])
        for model in facts.base_models:
            patches = [
                server_service_pb2.ModelPatch(name=name, options=struct_of(options))
                for name, options in model.patches.items()
            ]
            info.base_models.add(**{**vars(model), 'patches': patches})
        for kind in sorted(facts.components):
            info.components.add(kind=kind, names=sorted(facts.components[kind]))
        if facts.trainer is not None:
            info.trainer.CopyFrom(server_service_pb2.TrainerInfo(**vars(facts.trainer)))
        return info

    async def GetServerInfo(  # noqa: N802 (the contract's name)
        self,
        request: server_service_pb2.GetServerInfoRequest,
        context: Context,
    ) -> server_service_pb2.GetServerInfoResponse:
        """Return the description of this service as a response."""
        return server_service_pb2.GetServerInfoResponse(contract_version=CONTRACT_VERSION, services=[self.describe()])
