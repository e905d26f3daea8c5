"""The model services as the gateway's own calls reach them: the channel of each, and what each says of itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import grpc

from services.gateway.forwarding.ports import ModelRoutes
from services.gateway.forwarding.upstream_facts import GrpcUpstreamFacts
from services.kit.caller import Caller
from services.kit.errors import Code
from services.kit.rpc.channel import forwarded_metadata
from services.kit.rpc.context import acting_for
from services.kit.rpc.status import error_from_call
from twinkle.api.model.v1 import adapter_service_pb2

_GET = f'/{adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name}/GetAdapter'
_PATIENCE_SECONDS = 5.0
"""For a question that needs no turn."""


class ModelChannels:
    """Finds the channel that a call goes over."""

    def __init__(self, routes: ModelRoutes, channels: Mapping[str, grpc.aio.Channel]) -> None:
        """Choose by `routes` among `channels`, bare ones, by the name of their services."""
        self._routes = routes
        self._channels = channels

    async def of_adapter(self, tenant_id: str, adapter_id: str) -> grpc.aio.Channel:
        """Return the channel to the service that has a tenant's adapter, or that refuses it as well as any.

        Raises:
            ServiceUnreachable: one that cannot be reached may have it.
        """
        return self._channels[await self._routes.owner_of(tenant_id, adapter_id) or self._routes.services[0]]

    async def of_new_adapter(self, tenant_id: str, base_model: str, adapter_id: str) -> grpc.aio.Channel:
        """Return the channel to the service that is to make an adapter, of an id that may be empty.

        Raises:
            BaseModelNotFound: no service holds the base model.
            ServiceUnreachable: one that was never reached may hold it.
            AdapterIdTaken: the tenant has, or had, an adapter of that id at another service.
        """
        return self._channels[await self._routes.maker_of(tenant_id, base_model, adapter_id)]


class GrpcModelFacts:
    """Implements `ports.ModelFacts`."""

    def __init__(
        self,
        facts: Mapping[str, GrpcUpstreamFacts],
        channels: Mapping[str, grpc.aio.Channel],
        *,
        internal_token: str,
    ) -> None:
        """Ask by name of the service.

        Args:
            facts: what each says of itself.
            channels: bare ones, for questions on behalf of a tenant.
            internal_token: tells the services that the identity beside it is to be believed.
        """
        self._facts = facts
        self._channels = channels
        self._internal_token = internal_token

    async def base_models(self, service: str) -> Collection[str] | None:
        """Return what a service holds; None where it does not answer."""
        info = await self._facts[service].describe()
        return [item.base_model for item in info.base_models] if info.is_reachable else None

    async def has_adapter(self, service: str, tenant_id: str, adapter_id: str) -> bool:
        """Say whether a service has a tenant's adapter.

        Raises:
            DomainError: it cannot be asked now.
        """
        request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id).SerializeToString()
        with acting_for(Caller(tenant_id=tenant_id, scopes=frozenset({'train'}))):
            metadata = forwarded_metadata(self._internal_token)
        call = cast(Any, self._channels[service]).unary_unary(_GET)
        try:
            await call(request, timeout=_PATIENCE_SECONDS, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            failure = error_from_call(error, service='model')
            if failure.code in {Code.NOT_FOUND, Code.INVALID_ARGUMENT}:
                return False
            raise failure from error
        return True
