"""gRPC client of the samplers. Only the fields that failover and accounting need are parsed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any, cast

import grpc

from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle_services.gateway.errors import AdapterNotPublished
from twinkle_services.gateway.fleet.convert import load_from_proto, resident_from_proto
from twinkle_services.gateway.fleet.grpc import ReplicaChannels
from twinkle_services.gateway.fleet.rules import ReplicaLoad, ResidentAdapter
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.sampling.messages import (
    adapter_of,
    batch_message,
    chunk_from_bytes,
    continued_request,
    prompt_result,
    renumbered_error,
    score_message,
)
from twinkle_services.gateway.sampling.rules import (
    BatchPart,
    BatchRequest,
    Progress,
    PromptResult,
    SampleChunk,
    SampleRequest,
)
from twinkle_services.kit.errors import AdapterExpired, AdapterNotFound, DomainError, ServiceUnreachable
from twinkle_services.kit.paging import MAX_PAGE_SIZE
from twinkle_services.kit.rpc.channel import forwarded_metadata
from twinkle_services.kit.rpc.status import error_from_call

_SERVICE = wire.DESCRIPTOR.services_by_name['SamplerService'].full_name


class SamplerClient:
    """Calls samplers on behalf of the current caller.

    Addresses are 'host:port' of a replica; deadlines are times on the event loop's clock, or None. Except for `abort`,
    calls raise the sampler's error as a DomainError, or ServiceUnreachable if the connection was refused or lost.
    Closing a generator cancels its call. `lookups` finds adapters that have no published version.
    """

    def __init__(self, channels: ReplicaChannels, lookups: GrpcLookups, *, internal_token: str) -> None:
        self._channels = channels
        self._lookups = lookups
        self._internal_token = internal_token

    async def sample(
        self, address: str, request: SampleRequest, *, progress: Progress, deadline: float | None
    ) -> AsyncGenerator[SampleChunk, None]:
        """Yield the response, or the rest of it after `progress`."""
        is_changed = progress.has_tokens or request.is_renamed
        message = continued_request(request, progress) if is_changed else request.message
        raws = self._stream(address, 'Sample', message, deadline=deadline, is_internal=progress.has_tokens)
        async with aclosing(raws):
            async for raw in raws:
                yield chunk_from_bytes(raw)

    async def complete(
        self, address: str, part: BatchPart, *, deadline: float | None
    ) -> AsyncGenerator[PromptResult, None]:
        """Yield the results of a part of a SampleBatch, in the order in which they finish."""
        missing = set(range(len(part.positions)))
        raws = self._stream(address, 'SampleBatch', batch_message(part), deadline=deadline)
        with _indices_of(part):
            async with aclosing(raws):
                async for raw in raws:
                    message = wire.SampleBatchResponse.FromString(raw)
                    index = message.prompt_index
                    if index not in missing:
                        raise ServiceUnreachable('sampler')
                    missing.discard(index)
                    yield prompt_result(raw, message, part.positions[index])

    async def score(self, address: str, part: BatchPart, *, deadline: float | None) -> bytes:
        """Return the ComputeLogprobsResponse for a part of a batch."""
        with _indices_of(part):
            return await self.call(address, 'ComputeLogprobs', score_message(part), deadline=deadline)

    async def resolve(self, address: str, request: BatchRequest, *, deadline: float | None) -> int:
        """Load the adapter of a batch at the replica and return the version that the replica chose."""
        adapter = adapter_of(request.message, is_scored=request.is_scored)
        message = wire.LoadAdapterRequest(adapter=adapter).SerializeToString()
        raw = await self.call(address, 'LoadAdapter', message, deadline=deadline)
        return wire.LoadAdapterResponse.FromString(raw).adapter.version

    async def call(self, address: str, method: str, message: bytes, *, deadline: float | None) -> bytes:
        """Call a unary method, such as 'Pause', and return its response."""
        channel = await self._channels.connected(address)
        call = cast(Any, channel).unary_unary(f'/{_SERVICE}/{method}')(
            message, timeout=_seconds_until(deadline), metadata=forwarded_metadata(self._internal_token)
        )
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise await self._refusal(error) from error
        except grpc.aio.UsageError as error:
            raise ServiceUnreachable('sampler') from error

    async def abort(self, address: str, request_id: str) -> bool:
        """Abort a request on a replica, and return whether the replica ran the request; False if the call failed."""
        message = wire.AbortRequest(request_id=request_id).SerializeToString()
        with suppress(DomainError):
            await self.call(address, 'Abort', message, deadline=None)
            return True
        return False

    async def resident_adapters(self, address: str, *, deadline: float | None) -> list[ResidentAdapter]:
        """Return all adapter versions of the caller at the replica."""
        found: list[ResidentAdapter] = []
        token = ''
        while True:
            message = wire.ListResidentAdaptersRequest(page_size=MAX_PAGE_SIZE, page_token=token).SerializeToString()
            raw = await self.call(address, 'ListResidentAdapters', message, deadline=deadline)
            page = wire.ListResidentAdaptersResponse.FromString(raw)
            found += map(resident_from_proto, page.adapters)
            token = page.next_page_token
            if not token:
                return found

    async def load(self, address: str, *, deadline: float | None) -> ReplicaLoad:
        raw = await self.call(address, 'GetLoad', b'', deadline=deadline)
        return load_from_proto(wire.GetLoadResponse.FromString(raw).load)

    async def _stream(
        self, address: str, method: str, message: bytes, *, deadline: float | None, is_internal: bool = False
    ) -> AsyncGenerator[bytes, None]:
        channel = await self._channels.connected(address)
        metadata = forwarded_metadata(self._internal_token, is_internal=is_internal)
        start = cast(Any, channel).unary_stream(f'/{_SERVICE}/{method}')
        call = start(message, timeout=_seconds_until(deadline), metadata=metadata)
        try:
            async for raw in call:
                yield raw
        except grpc.aio.AioRpcError as error:
            raise await self._refusal(error) from error
        except grpc.aio.UsageError as error:
            # The channel was closed: the replica left the fleet.
            raise ServiceUnreachable('sampler') from error
        finally:
            call.cancel()

    async def _refusal(self, failure: grpc.aio.AioRpcError) -> DomainError:
        """Return the sampler's error. For an unknown adapter, check whether the adapter is unpublished or expired."""
        error = error_from_call(failure, service='sampler')
        if error.reason == AdapterNotFound.reason:
            adapter_id = error.metadata().get('adapterId', '')
            try:
                await self._lookups.adapter(adapter_id)
            except DomainError as refusal:
                return refusal if refusal.reason == AdapterExpired.reason else error
            return AdapterNotPublished(adapter_id)
        return error


@contextmanager
def _indices_of(part: BatchPart) -> Iterator[None]:
    """Replace the prompt indices in errors that the block raises with the indices in the caller's batch."""
    try:
        yield
    except DomainError as error:
        raise renumbered_error(error, part) from error


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0)
