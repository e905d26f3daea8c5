"""Chooses the model service for each call: the one that holds the base model or the adapter of the request.

Only the fields that select the service are read from the serialized request. `forwarding.bytes` does the forwarding.
Lists of adapters are merged from the lists of all services.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Never, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor

from twinkle.api.model.v1 import adapter_pb2, adapter_service_pb2
from twinkle.data_format import base_model_id
from twinkle_services.gateway.errors import BaseModelsUnreachable
from twinkle_services.gateway.fleet.model_routes import ModelRoutes
from twinkle_services.gateway.forwarding.bytes import ForwardedMethod, Handler, Request
from twinkle_services.kit.errors import DomainError, InvalidField, InvalidPageToken, ServiceUnreachable
from twinkle_services.kit.paging import Page, page_token_after, parse_page
from twinkle_services.kit.rpc.call import Context, cancelled_if_disconnected
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto
from twinkle_services.kit.rpc.serialized_fields import UnreadableMessageError, has_field, peek_text

_ADAPTERS = adapter_service_pb2.DESCRIPTOR.services_by_name['AdapterService'].full_name
_CREATE, _LIST, _TAKE_OVER = (f'{_ADAPTERS}.{name}' for name in ('CreateAdapter', 'ListAdapters', 'TakeOver'))
_FIRST_OF_HOLDERS = (f'{_ADAPTERS}.EndLease', _TAKE_OVER)
"""Methods that only one of the services of a base model can run; a response shows whether its service ran it."""
_SELECTING_FIELDS = ('base_model', 'adapter_id')
"""Fields that select the service; a base model takes precedence over an adapter."""
_MESSAGE_FIELDS = ('operation', 'header')
"""Nested messages that may contain a selecting field."""

ListOne = Callable[[bytes, Context], Awaitable[bytes]]
"""Calls ListAdapters of one service."""
_Key = tuple[int, int, str]
_KEY_TYPES = (int, int, str, str)
_grpc: Any = grpc


class ModelRoute:
    """Chooses the service for each call of one method, see `forwarding.bytes.Route`.

    Raises:
        ValueError: the requests of the method have no field that selects the service.
    """

    def __init__(self, method: MethodDescriptor, routes: ModelRoutes) -> None:
        self._method = method
        self._paths = paths_of(method)
        self._routes = routes

    async def __call__(self, request: Request) -> tuple[str, Request]:
        """Return the service of a request, or of the first request of a stream, and the request or stream.

        A request for which no service can be determined goes to the first of all services, which refuses it.

        Raises:
            InvalidField: an id is invalid or missing. Iterating over a stream of operations also raises it if a request
                belongs to another service.
            DomainError: see `ModelRoutes`.
        """
        if isinstance(request, bytes):
            return await self._find(request) or self._routes.services[0], request
        rest = aiter(request)
        first = await anext(rest, None)
        service = (None if first is None else await self._find(first)) or self._routes.services[0]
        return service, self._joined(first, rest, service)

    async def _find(self, request: bytes) -> str | None:
        """Return the service of a request; None if no service has its adapter, or if the request cannot be read."""
        try:
            texts = {name: peek_text(request, *path) for name, path in self._paths.items()}
            self._check_header(request, texts)
        except UnreadableMessageError:
            # The service parses the request and reports what is wrong with it.
            return None
        adapter_id = texts.get('adapter_id', '')
        if 'base_model' not in texts:
            return await self._routes.owner_of(current_caller().tenant_id, adapter_id)
        request_id = texts.get('request_id', '')
        # The ids become keys of stored rows even if the service then refuses the request.
        for value, field in ((adapter_id, 'adapter_id'), (request_id, 'request_id')):
            if value:
                id_from_proto(value, field)
        return await self._routes.creator_of(current_caller().tenant_id, texts['base_model'], adapter_id, request_id)

    def _check_header(self, request: bytes, texts: Mapping[str, str]) -> None:
        if self._method.name != 'UploadBatch' or texts['adapter_id']:
            return
        if has_field(request, self._paths['adapter_id'][0]):
            problem = 'is required with several model services; name the adapter that will use the upload'
            raise InvalidField('header.adapter_id', problem)

    async def _joined(
        self, first: bytes | None, rest: AsyncIterator[bytes], service: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield the requests of a stream to a service, and check that all operations belong to the service."""
        if first is None:
            return
        yield first
        async for request in rest:
            if self._method.server_streaming and await self._find(request) not in {service, None}:
                problem = 'belongs to a different model service than the first operation; use one stream per adapter'
                raise InvalidField('operation.adapter_id', problem)
            yield request


def paths_of(method: MethodDescriptor) -> dict[str, tuple[int, ...]]:
    """Return the paths of the fields that select the service, as field numbers, outermost first.

    For a creation, these include the id of the request, with which a repeated request reaches the same service.

    Raises:
        ValueError: the requests have neither a base model nor an adapter.
    """
    fields: Mapping[str, Any] = method.input_type.fields_by_name
    paths: dict[str, tuple[int, ...]] = {name: (fields[name].number,) for name in _SELECTING_FIELDS if name in fields}
    for outer in _MESSAGE_FIELDS:
        inner: Mapping[str, Any] = fields[outer].message_type.fields_by_name if outer in fields else {}
        paths |= {name: (fields[outer].number, inner[name].number) for name in _SELECTING_FIELDS if name in inner}
    if not paths:
        raise ValueError(f'{method.full_name} has no field that selects the model service')
    if method.full_name == _CREATE:
        paths['request_id'] = (fields['request_id'].number,)
    return paths


def model_handler(method: ForwardedMethod, routes: ModelRoutes) -> Handler:
    """Return the handler of a method whose calls `ModelRoute` routes, or a handler that calls several services."""
    if method.descriptor.full_name in _FIRST_OF_HOLDERS:
        return _grpc.unary_unary_rpc_method_handler(FirstOfHolders(method, routes))
    if method.descriptor.full_name == _LIST:
        services = {name: partial(method.call_at, name) for name in routes.services}
        return _grpc.unary_unary_rpc_method_handler(AdapterLists(services, base_models_of=routes.table.held_by))
    return method.handler(ModelRoute(method.descriptor, routes))


class FirstOfHolders:
    """Calls the services of a base model in turn, until one has carried out the request.

    An empty response means that the service had nothing to do, so the next one is called. A takeover ends with the
    first response, which is empty if there were no runs to take over. If no service carried out the request, the first
    error is raised, because the service that failed may be the one that had to carry it out.
    """

    def __init__(self, method: ForwardedMethod, routes: ModelRoutes) -> None:
        self._method = method
        self._routes = routes
        self._base_model_path = paths_of(method.descriptor)['base_model']
        self._is_once = method.descriptor.full_name == _TAKE_OVER

    async def __call__(self, request: bytes, context: Context) -> bytes:
        base_model, failures = '', list[_Refusal | DomainError]()
        attempt: Any = _Attempt(context)
        with suppress(UnreadableMessageError):
            base_model = base_model_id(peek_text(request, *self._base_model_path))
        for name in await self._routes.holders_of(base_model):
            try:
                response = await self._method.call_at(name, request, attempt)
            except (DomainError, _Refusal) as error:
                failures.append(error)
                continue
            if response or self._is_once:
                return response
        if failures:
            await _fail(failures[0], context)
        return b''


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


class AdapterLists:
    """Serves ListAdapters for several model services.

    A page token contains a page token of each service and the last adapter that was listed. If only a part of a
    service's page was listed, that page is read again, and the list continues after the last adapter. `services`
    contains ListAdapters of each service, and `base_models_of` returns the base models that a service is known to hold.
    """

    def __init__(self, services: Mapping[str, ListOne], *, base_models_of: Callable[[str], Collection[str]]) -> None:
        self._services = services
        self._base_models_of = base_models_of

    async def __call__(self, raw: bytes, context: Context) -> bytes:
        """Return the serialized response to a serialized request. If a service refuses the call, end the client's call.

        Raises:
            InvalidField, InvalidPageToken: the request is invalid.
            BaseModelsUnreachable: a service cannot be reached. The response cannot report that adapters are missing, so
                clients would mistake a partial list for a complete list.
            DeadlinePassed: a service did not respond before the deadline.
        """
        request = adapter_service_pb2.ListAdaptersRequest.FromString(raw)
        query = f'ListAdapters of all/{current_caller().tenant_id}/{request.session_id}'
        page = parse_page(request.page_size, request.page_token, query=query, key_types=_KEY_TYPES)
        tokens = _tokens_of(page) if page.after else dict.fromkeys(self._services, '')
        responses = await self._fetch_all(request, tokens, page, context)
        last = page.after[:3] if page.after else None
        remaining = {
            name: [item for item in response.adapters if _is_after(item, last)] for name, response in responses.items()
        }
        merged = sorted((item for items in remaining.values() for item in items), key=_key_of, reverse=True)
        adapters = merged[: page.size]
        token = _next_token(adapters, remaining, {**tokens}, responses, query=query)
        return adapter_service_pb2.ListAdaptersResponse(adapters=adapters, next_page_token=token).SerializeToString()

    async def _fetch_all(
        self, request: adapter_service_pb2.ListAdaptersRequest, tokens: Mapping[str, str], page: Page, context: Context
    ) -> dict[str, adapter_service_pb2.ListAdaptersResponse]:
        async def fetch(name: str) -> adapter_service_pb2.ListAdaptersResponse | None:
            own = adapter_service_pb2.ListAdaptersRequest()
            own.CopyFrom(request)
            own.page_size, own.page_token = page.size, tokens[name]
            try:
                raw = await self._services[name](own.SerializeToString(), context)
            except ServiceUnreachable:
                return None
            return adapter_service_pb2.ListAdaptersResponse.FromString(raw)

        names = [name for name in tokens if name in self._services]
        calls = [asyncio.create_task(fetch(name)) for name in names]
        try:
            responses = dict(zip(names, await asyncio.gather(*calls), strict=True))
        finally:
            # If one call is refused, the others end too.
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        if unreachable := [name for name, response in responses.items() if response is None]:
            base_models = {item for name in unreachable for item in self._base_models_of(name)}
            raise BaseModelsUnreachable('model', ', '.join(sorted(base_models)))
        return {name: response for name, response in responses.items() if response is not None}


def _next_token(
    shown: list[adapter_pb2.Adapter],
    remaining: Mapping[str, list[adapter_pb2.Adapter]],
    tokens: dict[str, str],
    responses: Mapping[str, adapter_service_pb2.ListAdaptersResponse],
    *,
    query: str,
) -> str:
    """Return the token of the page after `shown`; empty on the last page."""
    if not shown:
        return ''
    last = _key_of(shown[-1])
    for name, response in responses.items():
        if any(_is_after(item, last) for item in remaining[name]):
            continue
        if response.next_page_token:
            tokens[name] = response.next_page_token
        else:
            del tokens[name]
    return page_token_after((*last, json.dumps(tokens)), query=query) if tokens else ''


def _tokens_of(page: Page) -> dict[str, str]:
    """Return the page token of each service that may have more adapters.

    Raises:
        InvalidPageToken: the token was not issued by this method.
    """
    assert page.after is not None  # noqa: S101 (called only with a token)
    try:
        tokens = json.loads(str(page.after[3]))
    except (ValueError, RecursionError) as error:
        raise InvalidPageToken() from error
    values = cast(dict[str, Any], tokens).values() if isinstance(tokens, dict) else [None]
    # Issued tokens are ASCII; other text could contain unpaired surrogates, which messages cannot contain.
    if not all(isinstance(item, str) and item.isascii() for item in values):
        raise InvalidPageToken()
    return cast(dict[str, str], tokens)


def _key_of(adapter: adapter_pb2.Adapter) -> _Key:
    return adapter.create_time.seconds, adapter.create_time.nanos, adapter.adapter_id


def _is_after(adapter: adapter_pb2.Adapter, last: Any) -> bool:
    """Return whether an adapter comes after `last` in a list from newest to oldest; True without `last`."""
    return last is None or _key_of(adapter) < last
