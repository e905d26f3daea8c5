"""Services behind the gateway: their descriptions, the channels to them, and single lookups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol, cast

import grpc

from twinkle.api.checkpoint.v1 import checkpoint_pb2, checkpoint_service_pb2, version_service_pb2
from twinkle.api.model.v1 import adapter_pb2, adapter_service_pb2
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle_services.gateway.catalogue.rules import EntryKey, Run
from twinkle_services.gateway.catalogue.sql import SqlRunStore
from twinkle_services.gateway.fleet.model_routes import MODEL, ModelRoutes
from twinkle_services.gateway.fleet.model_table import ModelReport
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import AdapterExpired, Code, DomainError, ServiceUnreachable
from twinkle_services.kit.rpc.channel import call_errors, forwarded_metadata, open_channel
from twinkle_services.kit.rpc.context import acting_for, current_caller
from twinkle_services.kit.tls import TlsConfig

DESCRIBE_SECONDS = 2.0
"""A service that takes longer to return its description counts as unreachable."""
_GET_ADAPTER = f'/{adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name}/GetAdapter'
_GET_ADAPTER_SECONDS = 5.0
_LOOKUP_SECONDS = 30.0


class ServiceFacts(Protocol):
    """Describes one service behind the gateway."""

    async def describe(self) -> server_service_pb2.ServiceInfo:
        """Return the service's description; `is_reachable` is false if it did not respond."""
        ...


class GrpcUpstreamFacts:
    """Requests the description of one service, and caches the description for `freshness`.

    `channel` is an internal channel; None if the service is not part of this deployment.

    Concurrency: concurrent calls share one request.
    """

    def __init__(self, service: str, *, channel: grpc.aio.Channel | None, clock: Clock, freshness: timedelta) -> None:
        self._service = service
        self._stub = None if channel is None else server_service_pb2_grpc.ServerServiceStub(channel)
        self._clock = clock
        self._freshness_seconds = freshness.total_seconds()
        self._lock = asyncio.Lock()
        self._info: server_service_pb2.ServiceInfo | None = None
        self._stale_at = 0.0

    async def describe(self) -> server_service_pb2.ServiceInfo:
        async with self._lock:
            if self._info is None or self._stale_at <= self._clock.monotonic():
                self._info = await self._request()
                self._stale_at = self._clock.monotonic() + self._freshness_seconds
            return self._info

    async def _request(self) -> server_service_pb2.ServiceInfo:
        unreachable = server_service_pb2.ServiceInfo(service=self._service)
        if self._stub is None:
            return unreachable
        try:
            response = await self._stub.GetServerInfo(
                server_service_pb2.GetServerInfoRequest(), timeout=DESCRIBE_SECONDS
            )
        except grpc.aio.AioRpcError:
            return unreachable
        # A service describes only itself, so the response has one element.
        return response.services[0] if response.services else unreachable


class GrpcFleetFacts:
    """Describes all samplers of the fleet as one service.

    `addresses` returns the current addresses of the samplers. Their descriptions are cached for `freshness`.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        *,
        internal_token: str,
        clock: Clock,
        freshness: timedelta,
        tls: TlsConfig,
    ) -> None:
        self._tls = tls
        self._addresses = addresses
        self._internal_token = internal_token
        self._clock = clock
        self._freshness = freshness
        self._known: dict[str, tuple[grpc.aio.Channel, GrpcUpstreamFacts]] = {}
        """Channel and description of each sampler by address."""

    async def describe(self) -> server_service_pb2.ServiceInfo:
        """Return the merged description; `is_reachable` is false if no sampler responded."""
        addresses = self._addresses()
        await self._keep_only(addresses)
        descriptions = await asyncio.gather(*(self._facts_of(address).describe() for address in addresses))
        return merged([description for description in descriptions if description.is_reachable])

    async def close(self) -> None:
        await self._keep_only(())

    def _facts_of(self, address: str) -> GrpcUpstreamFacts:
        if address not in self._known:
            channel = open_channel(address, internal_token=self._internal_token, tls=self._tls, service='sampler')
            facts = GrpcUpstreamFacts('sampler', channel=channel, clock=self._clock, freshness=self._freshness)
            self._known[address] = channel, facts
        return self._known[address][1]

    async def _keep_only(self, addresses: Sequence[str]) -> None:
        for address in [address for address in self._known if address not in addresses]:
            channel, _ = self._known.pop(address)
            await channel.close()


def merged(descriptions: Sequence[server_service_pb2.ServiceInfo]) -> server_service_pb2.ServiceInfo:
    """Return a copy of the first description, with the base models and engine versions of all descriptions.

    A base model can be sampled, or a method is supported, if this is true for at least one sampler. If there are no
    descriptions, the result describes an unreachable service.
    """
    if not descriptions:
        return server_service_pb2.ServiceInfo(service='sampler')
    combined = server_service_pb2.ServiceInfo()
    combined.CopyFrom(descriptions[0])
    combined.service = 'sampler'
    models = {model.base_model: model for model in combined.base_models}
    methods = {method.method: method for method in combined.methods}
    combined.engine_version = ', '.join(sorted({description.engine_version for description in descriptions} - {''}))
    for description in descriptions[1:]:
        for model in description.base_models:
            if model.base_model not in models:
                models[model.base_model] = combined.base_models.add()
                models[model.base_model].CopyFrom(model)
            models[model.base_model].is_sampleable |= model.is_sampleable
        for method in description.methods:
            if method.method in methods:
                methods[method.method].is_supported |= method.is_supported
    return combined


class ModelChannels:
    """Chooses the channel to a model service. `channels` have no interceptors and are keyed by service name.

    Without `routes`, there is one model service, which receives every call.
    """

    def __init__(self, routes: ModelRoutes | None, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self._routes = routes
        self._channels = channels

    async def of_adapter(self, tenant_id: str, adapter_id: str) -> grpc.aio.Channel:
        """Return the channel to the service that has a tenant's adapter, or to the first one if no service has it.

        Raises:
            ServiceUnreachable: a service that cannot be reached may have the adapter.
        """
        if self._routes is None:
            return self._channels[MODEL]
        return self._channels[await self._routes.owner_of(tenant_id, adapter_id) or self._routes.services[0]]

    async def of_new_adapter(
        self, tenant_id: str, base_model: str, adapter_id: str, *, request_id: str
    ) -> grpc.aio.Channel:
        """Return the channel to the service that creates an adapter; `adapter_id` may be empty.

        Raises:
            DomainError: see `ModelRoutes.creator_of`.
        """
        if self._routes is None:
            return self._channels[MODEL]
        return self._channels[await self._routes.creator_of(tenant_id, base_model, adapter_id, request_id)]


class GrpcModelFacts:
    """Implements `ModelFacts`. `channels` must not add credentials, because queries are sent on behalf of a tenant."""

    def __init__(
        self, facts: Mapping[str, GrpcUpstreamFacts], channels: Mapping[str, grpc.aio.Channel], *, internal_token: str
    ) -> None:
        self._facts = facts
        self._channels = channels
        self._internal_token = internal_token

    async def report(self, service: str) -> ModelReport | None:
        info = await self._facts[service].describe()
        if not info.is_reachable:
            return None
        return ModelReport(
            base_models=frozenset(item.base_model for item in info.base_models),
            journal_ids=tuple(info.trainer.journal_ids),
            free_count=info.trainer.free_adapter_count,
            adapter_count=info.trainer.adapter_count,
        )

    async def has_adapter(self, service: str, tenant_id: str, adapter_id: str) -> bool:
        request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id).SerializeToString()
        with acting_for(Caller(tenant_id=tenant_id, scopes=frozenset({'train'}))):
            metadata = forwarded_metadata(self._internal_token)
        call = cast(Any, self._channels[service]).unary_unary(_GET_ADAPTER)
        try:
            with call_errors('model'):
                await call(request, timeout=_GET_ADAPTER_SECONDS, metadata=metadata)
        except DomainError as error:
            if error.code in {Code.NOT_FOUND, Code.INVALID_ARGUMENT}:
                # A service that removed the adapter counts as its owner, because only it can name the checkpoint.
                return error.reason == AdapterExpired.reason
            raise
        return True


class ServiceRuns:
    """Implements `EntryStore` for the runs of one of several model services, and records their owner.

    A run counts as deleted only if no service has it.
    """

    def __init__(self, store: SqlRunStore, service: str, routes: ModelRoutes) -> None:
        self._store = store
        self._service = service
        self._routes = routes

    async def save(self, entry: Run) -> None:
        self._routes.owners.add(self._service, (entry.tenant_id, entry.run_id))
        await self._store.save(entry)

    async def mark_deleted(self, key: EntryKey, *, moment: datetime) -> None:
        if self._routes.owners.remove(self._service, key):
            await self._store.mark_deleted(key, moment=moment)

    async def mark_absent_deleted(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        owners = self._routes.owners
        owners.replace(self._service, present)
        # The other base models have a service that has not reported all its runs yet, so their runs stay active.
        if base_models := await self._routes.settled_base_models():
            await self._store.mark_absent_deleted(owners.keys, moment=moment, base_models=base_models)


class GrpcLookups:
    """Makes single calls on behalf of the current caller.

    Each call raises the service's error as a DomainError, or ServiceUnreachable. `checkpoint` is a channel without
    interceptors. Pass None for a service that is not part of this deployment.
    """

    def __init__(
        self, models: ModelChannels | None, checkpoint: grpc.aio.Channel | None, *, internal_token: str
    ) -> None:
        self._models = models
        self._checkpoint = checkpoint
        self._internal_token = internal_token

    async def adapter(self, adapter_id: str) -> adapter_pb2.Adapter:
        """Return an adapter."""
        request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
        if self._models is None:
            raise ServiceUnreachable('model')
        channel = await self._models.of_adapter(current_caller().tenant_id, adapter_id)
        raw = await self._call(channel, 'model', _GET_ADAPTER, request.SerializeToString())
        return adapter_service_pb2.GetAdapterResponse.FromString(raw).adapter

    async def checkpoint(self, checkpoint_path: str) -> checkpoint_pb2.Checkpoint:
        """Return the checkpoint with a native path."""
        request = checkpoint_service_pb2.GetCheckpointRequest(checkpoint_path=checkpoint_path)
        method = '/twinkle.api.checkpoint.v1.CheckpointService/GetCheckpoint'
        raw = await self._call(self._checkpoint, 'checkpoint', method, request.SerializeToString())
        return checkpoint_service_pb2.GetCheckpointResponse.FromString(raw).checkpoint

    async def unpin(self, adapter_id: str, version: int) -> None:
        """Unpin a version, so that the checkpoint service may replace it with newer versions."""
        request = version_service_pb2.UnpinVersionRequest(adapter_id=adapter_id, version=version)
        method = '/twinkle.api.checkpoint.v1.VersionService/UnpinVersion'
        await self._call(self._checkpoint, 'checkpoint', method, request.SerializeToString())

    async def _call(self, channel: grpc.aio.Channel | None, service: str, method: str, request: bytes) -> bytes:
        if channel is None:
            raise ServiceUnreachable(service)
        call = cast(Any, channel).unary_unary(method)
        metadata = forwarded_metadata(self._internal_token)
        with call_errors(service):
            return await call(request, timeout=_LOOKUP_SECONDS, metadata=metadata)


class Upstreams:
    """The services behind the gateway, by the names of the configuration.

    Args:
        channels: channels without interceptors, for calls on behalf of clients.
        internal: channels for calls of the gateway itself.
        model_names: names of the model services in order of precedence.
        facts: descriptions of the services, including services that are not deployed.
        routes: finds the model service of a call; None if there is at most one model service.
        internal_token: proves the gateway's identity to the services.
    """

    def __init__(
        self,
        channels: Mapping[str, grpc.aio.Channel],
        internal: Mapping[str, grpc.aio.Channel],
        model_names: Sequence[str],
        *,
        facts: Mapping[str, GrpcUpstreamFacts],
        routes: ModelRoutes | None,
        internal_token: str,
    ) -> None:
        self.channels = channels
        self.internal = internal
        self.facts = facts
        self.models = {name: channels[name] for name in model_names}
        self.internal_models = {name: internal[name] for name in model_names}
        self.routes = routes
        self.calls = ModelChannels(routes, self.models) if self.models else None
        """Finds the channel of a call to a model service; None without a model service."""
        self.lookups = GrpcLookups(self.calls, channels.get('checkpoint'), internal_token=internal_token)

    def channels_to(self, kind: str) -> Mapping[str, grpc.aio.Channel]:
        """Return the channels for calls on behalf of clients to the services of a kind, such as 'model', by name."""
        if kind == MODEL:
            return self.models
        return {kind: self.channels[kind]} if kind in self.channels else {}

    def all_facts(self, samplers: ServiceFacts) -> list[ServiceFacts]:
        """Return the sources of the descriptions of all services; `samplers` describes the fleet."""
        return [*self.model_facts, samplers, self.facts['data'], self.facts['checkpoint']]

    @property
    def model_facts(self) -> list[GrpcUpstreamFacts]:
        """Sources of the descriptions of the model services."""
        return [self.facts[name] for name in self.models or (MODEL,)]
