"""Merged lists of the adapters of several model services, even if some services are unreachable."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from twinkle.api.model.v1 import adapter_pb2
from twinkle.api.model.v1 import adapter_service_pb2 as wire
from twinkle_services.gateway.errors import BaseModelsUnreachable
from twinkle_services.gateway.forwarding.by_model import AdapterLists
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import InvalidPageToken, ServiceUnreachable
from twinkle_services.kit.paging import page_token_after
from twinkle_services.kit.rpc.context import acting_for

CONTEXT: Any = None
"""Context of the call. The services of these tests ignore it."""
BASE_MODELS = {'one': ['small'], 'two': ['large', 'huge'], 'three': []}


def service_of(*adapter_ids: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
    """Return a service with the given adapters; a service without adapters is unreachable."""

    async def respond(request: bytes, context: Any) -> bytes:
        del request, context
        if not adapter_ids:
            raise ServiceUnreachable('model')
        adapters = [adapter_pb2.Adapter(adapter_id=item) for item in adapter_ids]
        return wire.ListAdaptersResponse(adapters=adapters).SerializeToString()

    return respond


async def listed(page_token: str = '', /, **services: Callable[[bytes, Any], Awaitable[bytes]]) -> list[str]:
    """Return the ids of the adapters of all services."""
    lists = AdapterLists(services, base_models_of=BASE_MODELS.__getitem__)
    with acting_for(Caller(tenant_id='alice', scopes=frozenset({'train'}))):
        raw = await lists(wire.ListAdaptersRequest(page_token=page_token).SerializeToString(), CONTEXT)
    return [item.adapter_id for item in wire.ListAdaptersResponse.FromString(raw).adapters]


async def test_adapters_of_all_services_are_listed_together() -> None:
    """The list contains every adapter of every service exactly once."""
    assert await listed(one=service_of('b', 'a'), two=service_of('c')) == ['c', 'b', 'a']


@pytest.mark.parametrize(
    ('unreachable', 'base_models'),
    [(['one'], 'small'), (['two'], 'huge, large'), (['one', 'two'], 'huge, large, small'), (['three'], '')],
)
async def test_refusal_names_the_base_models_of_unreachable_services(unreachable: list[str], base_models: str) -> None:
    """The error for an incomplete list has the known base models of the unreachable services."""
    services = {name: service_of() if name in unreachable else service_of(name) for name in BASE_MODELS}
    with pytest.raises(BaseModelsUnreachable) as refused:
        await listed(**services)
    assert (refused.value.service, refused.value.base_models) == ('model', base_models)
    assert refused.value.retry_after is not None


@pytest.mark.parametrize('tokens', ['', '[]', '[' * 100_000, '{"one": 1}', '{"one": "\\ud800"}'])
async def test_forged_tokens_of_services_are_refused(tokens: str) -> None:
    """A token that contains anything else than tokens of the services is an invalid argument."""
    token = page_token_after((0, 0, 'b', tokens), query='ListAdapters of all/alice/')
    with pytest.raises(InvalidPageToken):
        await listed(token, one=service_of('a'))
