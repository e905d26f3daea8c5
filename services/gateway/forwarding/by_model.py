"""Forwards calls to the model service that holds the base model or the adapter of the request.

Only the fields that select the service are read from the serialized request. `forwarding.bytes` does the forwarding.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Never

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from twinkle.api.model.v1 import adapter_service_pb2
from twinkle.data_format import base_model_id
from twinkle_services.gateway.fleet.model_routes import ModelRoutes
from twinkle_services.gateway.forwarding.bytes import Forwarder
from twinkle_services.gateway.forwarding.merged import AdapterLists
from twinkle_services.kit.errors import DomainError, InvalidField
from twinkle_services.kit.rpc.call import Context, cancelled_if_disconnected
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto
from twinkle_services.kit.rpc.serialized_fields import UnreadableMessageError, has_field, peek_text

_MODEL = 'model'
_LIST = f'/{adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name}/ListAdapters'
_CREATE, _TAKE_OVER = 'CreateAdapter', 'TakeOver'
_FIRST_OF_HOLDERS = tuple(_LIST.replace('ListAdapters', name) for name in ('EndLease', _TAKE_OVER))
"""Methods that only one of the services of a base model can run; a response shows whether its service ran it."""
_SELECTING_FIELDS = ('base_model', 'adapter_id')
"""Fields that select the service; a base model takes precedence over an adapter."""
_MESSAGE_FIELDS = ('operation', 'header')
"""Nested messages that may contain a selecting field."""

_grpc: Any = grpc
Handler = Any
"""Handler of a method. The type stubs of gRPC do not cover its asyncio handlers."""
Handlers = Mapping[str, Handler]
"""Handlers of one method by service."""
Find = Callable[[bytes], Awaitable[str | None]]
"""Returns the service for a request; None if no service has the adapter, so any service may refuse the request. The
function that `_base_model_at` returns is an exception: it returns the base model."""


class ModelForwarder:
    """Handles the methods of the model service's contracts that clients may call, over `channels` by service name.

    Raises:
        ValueError: the requests of a method have no field that selects the service.
    """

    def __init__(
        self,
        contracts: Sequence[ServiceDescriptor],
        *,
        channels: Mapping[str, grpc.aio.Channel],
        routes: ModelRoutes,
        internal_token: str,
    ) -> None:
        self.handlers: dict[str, Handler] = {}
        """Handlers of the methods by full name with a leading slash."""
        self._routes = routes
        by_service = {
            name: Forwarder({_MODEL: contracts}, channels={_MODEL: channel}, internal_token=internal_token).handlers
            for name, channel in channels.items()
        }
        methods = {f'/{contract.full_name}/{item.name}': item for contract in contracts for item in contract.methods}
        for path in next(iter(by_service.values())):
            handlers: Handlers = {name: handlers[path] for name, handlers in by_service.items()}
            if path in _FIRST_OF_HOLDERS:
                self.handlers[path] = self._first_of_holders(methods[path], handlers)
            elif path == _LIST:
                calls = {name: handler.unary_unary for name, handler in handlers.items()}
                lists = AdapterLists(calls, base_models_of=routes.known_base_models)
                self.handlers[path] = grpc.unary_unary_rpc_method_handler(lists)
            else:
                self.handlers[path] = self._handler(methods[path], handlers)

    def _handler(self, method: MethodDescriptor, by_service: Handlers) -> Handler:
        find = self._finder(method)
        match (method.client_streaming, method.server_streaming):
            case (False, False):
                return _grpc.unary_unary_rpc_method_handler(partial(self._unary_unary, find, by_service))
            case (False, True):
                return _grpc.unary_stream_rpc_method_handler(partial(self._unary_stream, find, by_service))
            case (True, False):
                return _grpc.stream_unary_rpc_method_handler(partial(self._stream_unary, find, by_service))
            case _:
                return _grpc.stream_stream_rpc_method_handler(partial(self._stream_stream, find, by_service))

    def _finder(self, method: MethodDescriptor) -> Find:
        paths = paths_of(method)
        adapter_path = paths.get('adapter_id', ())
        if base_model_path := paths.get('base_model'):
            request_path = (method.input_type.fields_by_name['request_id'].number,) if method.name == _CREATE else ()
            return partial(self._creator, base_model_path, adapter_path, request_path)
        return partial(self._header_owner if method.name == 'UploadBatch' else self._owner, adapter_path)

    async def _owner(self, path: tuple[int, ...], request: bytes) -> str | None:
        return await self._routes.owner_of(current_caller().tenant_id, peek_text(request, *path))

    async def _creator(
        self,
        base_model_path: tuple[int, ...],
        adapter_path: tuple[int, ...],
        request_path: tuple[int, ...],
        request: bytes,
    ) -> str | None:
        adapter_id = peek_text(request, *adapter_path) if adapter_path else ''
        request_id = peek_text(request, *request_path) if request_path else ''
        base_model = peek_text(request, *base_model_path)
        # The ids become keys of stored rows even if the service then refuses the request.
        for value, field in ((adapter_id, 'adapter_id'), (request_id, 'request_id')):
            if value:
                id_from_proto(value, field)
        return await self._routes.creator_of(current_caller().tenant_id, base_model, adapter_id, request_id)

    def _first_of_holders(self, method: MethodDescriptor, by_service: Handlers) -> Handler:
        """Return a handler that calls the services of a base model in turn, until one has carried out the request.

        An empty response means that the service had nothing to do, so the next one is called. A takeover ends with the
        first response, which is empty if there were no runs to take over. If no service carried out the request, the
        first error is raised, because the service that failed may be the one that had to carry it out.
        """
        is_once = method.name == _TAKE_OVER
        base_model_path = paths_of(method)['base_model']

        async def handle(request: bytes, context: Context) -> bytes:
            response, failures = None, list[_Refusal | DomainError]()
            base_model = await _found(_base_model_at(base_model_path), request) or ''
            for name in await self._routes.holders_of(base_model):
                try:
                    response = await by_service[name].unary_unary(request, _Attempt(context))
                except (DomainError, _Refusal) as error:
                    failures.append(error)
                if response or (is_once and response is not None):
                    return response
            if failures:
                await _fail(failures[0], context)
            return b''

        return _grpc.unary_unary_rpc_method_handler(handle)

    async def _header_owner(self, path: tuple[int, ...], request: bytes) -> str | None:
        if has_field(request, path[0]) and not peek_text(request, *path):
            problem = 'is required with several model services; name the adapter that will use the upload'
            raise InvalidField('header.adapter_id', problem)
        return await self._owner(path, request)

    async def _service_of(self, find: Find, request: bytes | None) -> str:
        return (None if request is None else await _found(find, request)) or self._routes.services[0]

    async def _unary_unary(self, find: Find, handlers: Handlers, request: bytes, context: Context) -> bytes:
        return await handlers[await self._service_of(find, request)].unary_unary(request, context)

    async def _unary_stream(
        self, find: Find, handlers: Handlers, request: bytes, context: Context
    ) -> AsyncGenerator[bytes, None]:
        handler = handlers[await self._service_of(find, request)]
        async with aclosing(handler.unary_stream(request, context)) as responses:
            async for response in responses:
                yield response

    async def _stream_unary(
        self, find: Find, handlers: Handlers, requests: AsyncIterator[bytes], context: Context
    ) -> bytes:
        first, rest = await _split_first(requests)
        handler = handlers[await self._service_of(find, first)]
        return await handler.stream_unary(_joined(first, rest), context)

    async def _stream_stream(
        self, find: Find, handlers: Handlers, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncGenerator[bytes, None]:
        first, rest = await _split_first(requests)
        name = await self._service_of(find, first)
        checked = _same_service(first, rest, name, find)
        async with aclosing(handlers[name].stream_stream(checked, context)) as responses:
            async for response in responses:
                yield response


class _Refusal(Exception):
    """A service refused a call; the arguments are the status of the call."""


class _Attempt:
    """Context of a call to one of several services. A refusal by this service does not end the client's call."""

    def __init__(self, context: Context) -> None:
        self.time_remaining = context.time_remaining
        self.set_trailing_metadata = context.set_trailing_metadata

    async def abort(self, *status: Any) -> Never:
        raise _Refusal(*status)


async def _fail(failure: _Refusal | DomainError, context: Context) -> None:
    """End the client's call with the failure of a service."""
    if isinstance(failure, DomainError):
        raise failure
    with cancelled_if_disconnected():
        await context.abort(*failure.args)


def _base_model_at(path: tuple[int, ...]) -> Find:
    async def base_model_of(request: bytes) -> str:
        return base_model_id(peek_text(request, *path))

    return base_model_of


def paths_of(method: MethodDescriptor) -> dict[str, tuple[int, ...]]:
    """Return the paths of the base model and the adapter in a method's requests, as field numbers, outermost first.

    Raises:
        ValueError: the requests have neither field.
    """
    fields: Mapping[str, Any] = method.input_type.fields_by_name
    paths: dict[str, tuple[int, ...]] = {name: (fields[name].number,) for name in _SELECTING_FIELDS if name in fields}
    for outer in _MESSAGE_FIELDS:
        inner: Mapping[str, Any] = fields[outer].message_type.fields_by_name if outer in fields else {}
        paths |= {name: (fields[outer].number, inner[name].number) for name in _SELECTING_FIELDS if name in inner}
    if not paths:
        raise ValueError(f'{method.full_name} has no field that selects the model service')
    return paths


async def _split_first(requests: AsyncIterator[bytes]) -> tuple[bytes | None, AsyncIterator[bytes]]:
    """Return the first request of a stream, or None if the stream is empty, and the rest of the stream."""
    rest = aiter(requests)
    return await anext(rest, None), rest


async def _found(find: Find, request: bytes) -> str | None:
    try:
        return await find(request)
    except UnreadableMessageError:
        # The service parses the request and reports what is wrong with it.
        return None


async def _same_service(
    first: bytes | None, rest: AsyncIterator[bytes], name: str, find: Find
) -> AsyncGenerator[bytes, None]:
    """Yield the requests of a stream to one service.

    Raises:
        InvalidField: a request belongs to another service.
    """
    if first is None:
        return
    yield first
    async for request in rest:
        if await _found(find, request) not in {name, None}:
            problem = 'belongs to a different model service than the first operation; use one stream per adapter'
            raise InvalidField('operation.adapter_id', problem)
        yield request


async def _joined(first: bytes | None, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    if first is None:
        return
    yield first
    async for request in rest:
        yield request
