"""Passes calls on to one of several model services: the one whose base model or adapter the call is about.

What decides is read out of the serialized request; nothing else of it is parsed. Everything else is as
`forwarding` has it, which does the passing on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from services.gateway.forwarding.adapter_lists import AdapterLists
from services.gateway.forwarding.bytes import Context, Forwarder
from services.gateway.forwarding.ports import ModelRoutes
from services.kit.errors import InvalidField
from services.kit.rpc.context import current_caller
from services.kit.rpc.serialized_fields import UnreadableMessageError, has_field, peek_text
from twinkle.api.model.v1 import adapter_service_pb2

_MODEL = 'model'
_LIST = f'/{adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name}/ListAdapters'
_ABOUT = ('base_model', 'adapter_id')
"""Fields that say what a request is about; whoever names a base model makes something new of it."""
_AROUND = ('operation', 'header')
"""Messages of requests that have such a field."""

Handler: TypeAlias = 'grpc.RpcMethodHandler[Any, Any]'
Find = Callable[[bytes], Awaitable[str | None]]
"""Returns the service that a request is for; None where any will do, since each will refuse it."""


class ModelForwarder(grpc.GenericRpcHandler):
    """Handles every method of the model service's contracts."""

    def __init__(
        self,
        contracts: Sequence[ServiceDescriptor],
        *,
        channels: Mapping[str, grpc.aio.Channel],
        routes: ModelRoutes,
        internal_token: str,
    ) -> None:
        """Describe what goes where.

        Args:
            contracts: what the services serve.
            channels: name of a service to a channel, as `forwarding.open_forwarding_channel` opens it.
            routes: finds the service of a call.
            internal_token: tells the services that the identity beside it is to be believed.

        Raises:
            ValueError: a method says nowhere what it is about.
        """
        self._routes = routes
        ways = {
            name: Forwarder({_MODEL: contracts}, channels={_MODEL: channel}, internal_token=internal_token).handlers
            for name, channel in channels.items()
        }
        methods = {_path_of(method): method for contract in contracts for method in contract.methods}
        self._handlers: dict[str, Handler] = {}
        for path in next(iter(ways.values())):
            by_service = {name: handlers[path] for name, handlers in ways.items()}
            if path == _LIST:
                ones = {name: _unary(handler) for name, handler in by_service.items()}
                lists = AdapterLists(ones, base_models_of=routes.known_base_models)
                self._handlers[path] = grpc.unary_unary_rpc_method_handler(lists)
            else:
                self._handlers[path] = self._handler(methods[path], by_service)

    @property
    def methods(self) -> Mapping[str, bool]:
        """Full names of the methods that are forwarded, without leading slash."""
        return {name[1:]: True for name in self._handlers}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the method's handler; None where it is not forwarded."""
        return self._handlers.get(handler_call_details.method)

    def _handler(self, method: MethodDescriptor, by_service: Mapping[str, Handler]) -> Handler:
        find = self._finder(method)
        match (method.client_streaming, method.server_streaming):
            case (False, False):
                return grpc.unary_unary_rpc_method_handler(self._unary_unary(find, by_service))
            case (False, True):
                return grpc.unary_stream_rpc_method_handler(self._unary_stream(find, by_service))
            case (True, False):
                return grpc.stream_unary_rpc_method_handler(self._stream_unary(find, by_service))
            case _:
                return grpc.stream_stream_rpc_method_handler(self._stream_stream(find, by_service))

    def _finder(self, method: MethodDescriptor) -> Find:
        paths = paths_of(method)
        adapter_path = paths.get('adapter_id', ())
        if base_model_path := paths.get('base_model'):
            return self._maker_finder(base_model_path, adapter_path)
        return self._header_finder(adapter_path) if method.name == 'UploadBatch' else self._owner_finder(adapter_path)

    def _owner_finder(self, path: tuple[int, ...]) -> Find:
        async def find(request: bytes) -> str | None:
            return await self._routes.owner_of(current_caller().tenant_id, peek_text(request, *path))

        return find

    def _maker_finder(self, base_model_path: tuple[int, ...], adapter_path: tuple[int, ...]) -> Find:
        async def find(request: bytes) -> str | None:
            adapter_id = peek_text(request, *adapter_path) if adapter_path else ''
            base_model = peek_text(request, *base_model_path)
            return await self._routes.maker_of(current_caller().tenant_id, base_model, adapter_id)

        return find

    def _header_finder(self, path: tuple[int, ...]) -> Find:
        find_owner = self._owner_finder(path)

        async def find(request: bytes) -> str | None:
            if has_field(request, path[0]) and not peek_text(request, *path):
                problem = 'is needed where several base models are served: name the adapter that will use the upload'
                raise InvalidField('header.adapter_id', problem)
            return await find_owner(request)

        return find

    async def _service_of(self, find: Find, request: bytes | None) -> str:
        return (None if request is None else await _found(find, request)) or self._routes.services[0]

    def _unary_unary(self, find: Find, ways: Mapping[str, Handler]) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def forward(request: bytes, context: Context) -> bytes:
            return await _unary(ways[await self._service_of(find, request)])(request, context)

        return forward

    def _unary_stream(
        self, find: Find, ways: Mapping[str, Handler]
    ) -> Callable[[bytes, Context], AsyncGenerator[bytes, None]]:
        async def forward(request: bytes, context: Context) -> AsyncGenerator[bytes, None]:
            handler: Any = ways[await self._service_of(find, request)]
            async with aclosing(handler.unary_stream(request, context)) as responses:
                async for response in responses:
                    yield response

        return forward

    def _stream_unary(
        self, find: Find, ways: Mapping[str, Handler]
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        async def forward(requests: AsyncIterator[bytes], context: Context) -> bytes:
            first, rest = await _begun(requests)
            handler: Any = ways[await self._service_of(find, first)]
            return await handler.stream_unary(_joined(first, rest), context)

        return forward

    def _stream_stream(
        self, find: Find, ways: Mapping[str, Handler]
    ) -> Callable[[AsyncIterator[bytes], Context], AsyncGenerator[bytes, None]]:
        async def forward(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes, None]:
            first, rest = await _begun(requests)
            name = await self._service_of(find, first)
            handler: Any = ways[name]
            async with aclosing(handler.stream_stream(_alike(first, rest, name, find), context)) as responses:
                async for response in responses:
                    yield response

        return forward


def paths_of(method: MethodDescriptor) -> dict[str, tuple[int, ...]]:
    """Return where requests of a method have their base model and their adapter: numbers of fields, outermost first.

    Raises:
        ValueError: they have neither.
    """
    fields: Mapping[str, Any] = method.input_type.fields_by_name
    paths: dict[str, tuple[int, ...]] = {name: (fields[name].number,) for name in _ABOUT if name in fields}
    for around in _AROUND:
        inner: Mapping[str, Any] = fields[around].message_type.fields_by_name if around in fields else {}
        paths |= {name: (fields[around].number, inner[name].number) for name in _ABOUT if name in inner}
    if not paths:
        raise ValueError(f'{method.full_name} says nowhere which model service it is for')
    return paths


def _path_of(method: MethodDescriptor) -> str:
    return f'/{method.containing_service.full_name}/{method.name}'


def _unary(handler: Handler) -> Callable[[bytes, Context], Awaitable[bytes]]:
    function: Any = handler.unary_unary
    return function


async def _begun(requests: AsyncIterator[bytes]) -> tuple[bytes | None, AsyncIterator[bytes]]:
    """Return the first request of a stream, None where there is none, and the others."""
    rest = aiter(requests)
    return await anext(rest, None), rest


async def _found(find: Find, request: bytes) -> str | None:
    try:
        return await find(request)
    except UnreadableMessageError:
        # Whoever parses it says what is wrong with it.
        return None


async def _alike(first: bytes | None, rest: AsyncIterator[bytes], name: str, find: Find) -> AsyncGenerator[bytes, None]:
    """Yield the requests of a stream to one service.

    Raises:
        InvalidField: one is for another service.
    """
    if first is None:
        return
    yield first
    async for request in rest:
        if await _found(find, request) not in {name, None}:
            problem = 'is of another base model than the first one of this stream; use a stream for each'
            raise InvalidField('operation.adapter_id', problem)
        yield request


async def _joined(first: bytes | None, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    if first is None:
        return
    yield first
    async for request in rest:
        yield request
