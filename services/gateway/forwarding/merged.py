"""Merges responses of several services into one: ListAdapters (newest adapter first) and GetServerInfo."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, cast

from twinkle.api.model.v1 import adapter_pb2
from twinkle.api.model.v1 import adapter_service_pb2 as wire
from twinkle.api.server.v1 import server_service_pb2 as messages
from twinkle.api.server.v1 import server_service_pb2_grpc
from twinkle_services.gateway.errors import BaseModelsUnreachable
from twinkle_services.gateway.fleet.upstreams import ServiceFacts
from twinkle_services.kit.errors import InvalidPageToken, ServiceUnreachable
from twinkle_services.kit.paging import Page, page_token_after, parse_page
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.server_info import CONTRACT_VERSION

ListOne = Callable[[bytes, Context], Awaitable[bytes]]
"""Calls ListAdapters of one service."""
_Key = tuple[int, int, str]
_KEY_TYPES = (int, int, str, str)


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
        request = wire.ListAdaptersRequest.FromString(raw)
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
        return wire.ListAdaptersResponse(adapters=adapters, next_page_token=token).SerializeToString()

    async def _fetch_all(
        self, request: wire.ListAdaptersRequest, tokens: Mapping[str, str], page: Page, context: Context
    ) -> dict[str, wire.ListAdaptersResponse]:
        async def fetch(name: str) -> wire.ListAdaptersResponse | None:
            own = wire.ListAdaptersRequest()
            own.CopyFrom(request)
            own.page_size, own.page_token = page.size, tokens[name]
            try:
                raw = await self._services[name](own.SerializeToString(), context)
            except ServiceUnreachable:
                return None
            return wire.ListAdaptersResponse.FromString(raw)

        names = [name for name in tokens if name in self._services]
        responses = dict(zip(names, await asyncio.gather(*map(fetch, names)), strict=True))
        if unreachable := [name for name, response in responses.items() if response is None]:
            base_models = {item for name in unreachable for item in self._base_models_of(name)}
            raise BaseModelsUnreachable('model', ', '.join(sorted(base_models)))
        return {name: response for name, response in responses.items() if response is not None}


def _next_token(
    shown: list[adapter_pb2.Adapter],
    remaining: Mapping[str, list[adapter_pb2.Adapter]],
    tokens: dict[str, str],
    responses: Mapping[str, wire.ListAdaptersResponse],
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


class MergedServerInfoServicer(server_service_pb2_grpc.ServerServiceServicer):
    """Describes the gateway, followed by the services behind it in the order of `upstreams`."""

    def __init__(self, *, own: Callable[[], messages.ServiceInfo], upstreams: Sequence[ServiceFacts]) -> None:
        self._own = own
        self._upstreams = tuple(upstreams)

    async def GetServerInfo(  # noqa: N802 (the contract's name)
        self, request: messages.GetServerInfoRequest, context: Context
    ) -> messages.GetServerInfoResponse:
        others = await asyncio.gather(*(upstream.describe() for upstream in self._upstreams))
        own = self._own()
        _copy_support(own, others)
        response = messages.GetServerInfoResponse(contract_version=CONTRACT_VERSION, services=[own, *others])
        for service in response.services:
            # Clients must not see the journals and the load of the model services.
            service.ClearField('trainer')
        return response


def _copy_support(own: messages.ServiceInfo, others: Sequence[messages.ServiceInfo]) -> None:
    """Set `is_supported` of the methods in `own` that `others` also list to whether one of `others` supports them."""
    support: dict[str, bool] = {}
    for item in (item for info in others for item in info.methods):
        support[item.method] = support.get(item.method, False) or item.is_supported
    for item in own.methods:
        if not item.method.startswith('twinkle.api.server.'):
            item.is_supported = support.get(item.method, item.is_supported)
