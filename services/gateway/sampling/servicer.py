"""Serves the contract for samplers on behalf of the fleet. Requests are parsed once; responses stay bytes."""

# ruff: noqa: N802 (the methods have the contract's names)

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle_services.gateway.credentials import Scope, requirement_of
from twinkle_services.gateway.fleet.convert import load_to_proto
from twinkle_services.gateway.sampling import convert
from twinkle_services.gateway.sampling.rules import BatchRequest, RoutedRequest, SampleRequest
from twinkle_services.gateway.sampling.sampling import Sampling
from twinkle_services.kit.paging import page_token_after, parse_page
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto

_DESCRIPTOR = wire.DESCRIPTOR.services_by_name['SamplerService']


class SamplerServicer:
    """Implements the methods of the contract with the sampling operations."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    async def Sample(self, request: SampleRequest, context: Context) -> AsyncIterator[bytes]:
        deadline = convert.deadline_of(context)
        async with aclosing(self._sampling.sample(current_caller(), request, deadline=deadline)) as chunks:
            async for chunk in chunks:
                yield chunk.message

    async def SampleBatch(self, request: BatchRequest, context: Context) -> AsyncIterator[bytes]:
        deadline = convert.deadline_of(context)
        async with aclosing(self._sampling.sample_batch(current_caller(), request, deadline=deadline)) as results:
            async for result in results:
                yield result.message

    async def ComputeLogprobs(self, request: BatchRequest, context: Context) -> bytes:
        deadline = convert.deadline_of(context)
        return convert.join_scores(await self._sampling.compute_logprobs(current_caller(), request, deadline=deadline))

    async def DescribeTokens(self, request: RoutedRequest, context: Context) -> bytes:
        return await self._sampling.call_one(current_caller(), request, deadline=convert.deadline_of(context))

    async def Abort(self, request: wire.AbortRequest, context: Context) -> bytes:
        request_id = id_from_proto(request.request_id, 'request_id')
        await self._sampling.abort(current_caller(), request_id, request.SerializeToString())
        return wire.AbortResponse().SerializeToString()

    async def ListResidentAdapters(self, request: wire.ListResidentAdaptersRequest, context: Context) -> bytes:
        query = f'ListResidentAdapters {current_caller().tenant_id}'
        page = parse_page(request.page_size, request.page_token, query=query, key_types=(str, int))
        deadline = convert.deadline_of(context)
        adapters, after = await self._sampling.list_resident_adapters(current_caller(), page, deadline=deadline)
        return convert.residents_to_proto(adapters, next_page_token=page_token_after(after, query=query))

    async def LoadAdapter(self, request: RoutedRequest, context: Context) -> bytes:
        return await self._sampling.load_adapter(current_caller(), request, deadline=convert.deadline_of(context))

    async def UnloadAdapter(self, request: bytes, context: Context) -> bytes:
        return (await self._call_all('UnloadAdapter', request, context))[0]

    async def GetLoad(self, request: wire.GetLoadRequest, context: Context) -> bytes:
        load = await self._sampling.load(current_caller())
        return wire.GetLoadResponse(load=load_to_proto(load)).SerializeToString()

    async def WatchLoad(self, request: wire.WatchLoadRequest, context: Context) -> AsyncIterator[bytes]:
        interval = convert.interval_from_proto(request)
        async with aclosing(self._sampling.watch_load(current_caller(), interval)) as loads:
            async for load in loads:
                yield wire.WatchLoadResponse(load=load_to_proto(load)).SerializeToString()

    async def ResetPrefixCache(self, request: bytes, context: Context) -> bytes:
        return convert.join_resets(await self._call_all('ResetPrefixCache', request, context))

    async def Pause(self, request: bytes, context: Context) -> bytes:
        return (await self._call_all('Pause', request, context))[0]

    async def Resume(self, request: bytes, context: Context) -> bytes:
        return (await self._call_all('Resume', request, context))[0]

    async def Sleep(self, request: bytes, context: Context) -> bytes:
        return (await self._call_all('Sleep', request, context))[0]

    async def WakeUp(self, request: bytes, context: Context) -> bytes:
        return (await self._call_all('WakeUp', request, context))[0]

    async def _call_all(self, method: str, request: bytes, context: Context) -> list[bytes]:
        scope = requirement_of(f'{_DESCRIPTOR.full_name}/{method}') or Scope.OPERATOR
        deadline = convert.deadline_of(context)
        return await self._sampling.call_all(current_caller(), method, request, scope=scope, deadline=deadline)


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    'Sample': convert.sample_request_from_bytes,
    'SampleBatch': convert.batch_request_from_bytes,
    'ComputeLogprobs': convert.score_request_from_bytes,
    'DescribeTokens': convert.describe_request_from_bytes,
    'LoadAdapter': convert.load_request_from_bytes,
    'Abort': wire.AbortRequest.FromString,
    'ListResidentAdapters': wire.ListResidentAdaptersRequest.FromString,
    'GetLoad': wire.GetLoadRequest.FromString,
    'WatchLoad': wire.WatchLoadRequest.FromString,
}
"""Decoders of the methods' requests; methods without a decoder receive the bytes."""


def sampler_handlers(sampling: Sampling) -> dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]:
    """Return the handlers of the contract's methods, by contract and method; handlers send the servicer's bytes."""
    servicer = SamplerServicer(sampling)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in _DESCRIPTOR.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        serve, decode = getattr(servicer, method.name), _DECODERS.get(method.name)
        handlers[method.name] = make(serve, request_deserializer=decode)
    return {_DESCRIPTOR.full_name: handlers}
