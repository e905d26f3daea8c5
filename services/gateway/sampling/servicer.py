"""The sampler's service of the contract, served for the whole fleet.

Requests are parsed once, into orders; answers stay bytes. Each method converts, awaits its verb, and converts.
"""

# ruff: noqa: N802 (the methods have the contract's names)

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from services.gateway.credentials import Scope, requirement_of
from services.gateway.fleet.convert import load_to_proto
from services.gateway.sampling import convert
from services.gateway.sampling.rules import BatchOrder, RoutedOrder, SampleOrder
from services.gateway.sampling.sampling_verbs import SamplingVerbs
from services.kit.paging import page_token_after, parse_page
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire

_Context = grpc.aio.ServicerContext[Any, Any]
_DESCRIPTOR = wire.DESCRIPTOR.services_by_name['SamplerService']


class SamplerServicer:
    """Samples, on whichever replica is right."""

    def __init__(self, verbs: SamplingVerbs) -> None:
        """Serve `verbs`."""
        self._verbs = verbs

    async def Sample(self, order: SampleOrder, context: _Context) -> AsyncIterator[bytes]:
        """Stream the completions of one prompt."""
        deadline = convert.deadline_of(context)
        async with aclosing(self._verbs.sample(current_caller(), order, deadline=deadline)) as pieces:
            async for piece in pieces:
                yield piece.raw

    async def SampleBatch(self, order: BatchOrder, context: _Context) -> AsyncIterator[bytes]:
        """Complete many prompts."""
        deadline = convert.deadline_of(context)
        async with aclosing(self._verbs.sample_batch(current_caller(), order, deadline=deadline)) as answers:
            async for answer in answers:
                yield answer.raw

    async def ComputeLogprobs(self, order: BatchOrder, context: _Context) -> bytes:
        """Score tokens."""
        scores = await self._verbs.compute_logprobs(current_caller(), order, deadline=convert.deadline_of(context))
        return convert.joined_scores(scores)

    async def DescribeTokens(self, order: RoutedOrder, context: _Context) -> bytes:
        """Tell what tokens stand for."""
        return await self._verbs.routed_call(current_caller(), order, deadline=convert.deadline_of(context))

    async def Abort(self, request: wire.AbortRequest, context: _Context) -> bytes:
        """End a request."""
        request_id = id_from_proto(request.request_id, 'request_id')
        await self._verbs.abort(current_caller(), request_id, request.SerializeToString())
        return wire.AbortResponse().SerializeToString()

    async def ListResidentAdapters(self, request: wire.ListResidentAdaptersRequest, context: _Context) -> bytes:
        """List what is held in the fleet."""
        query = f'ListResidentAdapters {current_caller().tenant_id}'
        page = parse_page(request.page_size, request.page_token, query=query, key_types=(str, int))
        deadline = convert.deadline_of(context)
        adapters, after = await self._verbs.list_resident_adapters(current_caller(), page, deadline=deadline)
        return convert.residents_to_proto(adapters, next_page_token=page_token_after(after, query=query))

    async def LoadAdapter(self, order: RoutedOrder, context: _Context) -> bytes:
        """Bring an adapter to where requests for it go."""
        return await self._verbs.load_adapter(current_caller(), order, deadline=convert.deadline_of(context))

    async def UnloadAdapter(self, request: bytes, context: _Context) -> bytes:
        """Drop an adapter everywhere."""
        return (await self._everywhere('UnloadAdapter', request, context))[0]

    async def GetLoad(self, request: wire.GetLoadRequest, context: _Context) -> bytes:
        """Say how busy the fleet is."""
        load = await self._verbs.get_load(current_caller())
        return wire.GetLoadResponse(load=load_to_proto(load)).SerializeToString()

    async def WatchLoad(self, request: wire.WatchLoadRequest, context: _Context) -> AsyncIterator[bytes]:
        """Say so again and again."""
        interval = convert.interval_from_proto(request)
        async with aclosing(self._verbs.watch_load(current_caller(), interval)) as loads:
            async for load in loads:
                yield wire.WatchLoadResponse(load=load_to_proto(load)).SerializeToString()

    async def ResetPrefixCache(self, request: bytes, context: _Context) -> bytes:
        """Empty all prefix caches."""
        return convert.dropped_in_all(await self._everywhere('ResetPrefixCache', request, context))

    async def Pause(self, request: bytes, context: _Context) -> bytes:
        """Stop all engines."""
        return (await self._everywhere('Pause', request, context))[0]

    async def Resume(self, request: bytes, context: _Context) -> bytes:
        """Let all engines go on."""
        return (await self._everywhere('Resume', request, context))[0]

    async def Sleep(self, request: bytes, context: _Context) -> bytes:
        """Give the accelerators' memory back everywhere."""
        return (await self._everywhere('Sleep', request, context))[0]

    async def WakeUp(self, request: bytes, context: _Context) -> bytes:
        """Wake all engines up."""
        return (await self._everywhere('WakeUp', request, context))[0]

    async def _everywhere(self, method: str, request: bytes, context: _Context) -> list[bytes]:
        scope = requirement_of(f'{_DESCRIPTOR.full_name}/{method}') or Scope.OPERATOR
        deadline = convert.deadline_of(context)
        return await self._verbs.broadcast(current_caller(), method, request, scope=scope, deadline=deadline)


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    'Sample': convert.sample_order_from_bytes,
    'SampleBatch': convert.batch_order_from_bytes,
    'ComputeLogprobs': convert.score_order_from_bytes,
    'DescribeTokens': convert.describe_order_from_bytes,
    'LoadAdapter': convert.load_order_from_bytes,
    'Abort': wire.AbortRequest.FromString,
    'ListResidentAdapters': wire.ListResidentAdaptersRequest.FromString,
    'GetLoad': wire.GetLoadRequest.FromString,
    'WatchLoad': wire.WatchLoadRequest.FromString,
}
"""What makes a method's argument of its request's bytes; where there is nothing, the bytes are passed on."""


class SamplerHandlers(grpc.GenericRpcHandler):
    """Hands the servicer orders instead of messages, and takes bytes from it."""

    def __init__(self, servicer: SamplerServicer) -> None:
        """Serve what `servicer` has."""
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for method in _DESCRIPTOR.methods:
            behaviour = getattr(servicer, method.name, None)
            if behaviour is None:
                continue
            make = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            name = f'/{_DESCRIPTOR.full_name}/{method.name}'
            self._handlers[name] = make(behaviour, request_deserializer=_DECODERS.get(method.name))

    @property
    def methods(self) -> Mapping[str, bool]:
        """Full names of the methods, without leading slash, and whether each is built."""
        names = [f'{_DESCRIPTOR.full_name}/{method.name}' for method in _DESCRIPTOR.methods]
        return {name: f'/{name}' in self._handlers for name in names}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler."""
        return self._handlers.get(handler_call_details.method)
