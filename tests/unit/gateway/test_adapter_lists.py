"""One list of adapters of several model services, and what is said where one of them is away."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.gateway.errors import BaseModelsUnreachable
from services.gateway.forwarding.adapter_lists import AdapterLists
from services.kit.caller import Caller
from services.kit.errors import ServiceUnreachable
from services.kit.rpc.context import acting_for
from twinkle.api.model.v1 import adapter_pb2
from twinkle.api.model.v1 import adapter_service_pb2 as wire

CONTEXT: Any = None
"""Of the call; the services of these tests do not look at it."""
HELD = {'one': ['small'], 'two': ['large', 'huge'], 'three': []}


def service_of(*adapter_ids: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
    """Return a service that has these, or, without any, cannot be reached."""

    async def answer(request: bytes, context: Any) -> bytes:
        del request, context
        if not adapter_ids:
            raise ServiceUnreachable('model')
        adapters = [adapter_pb2.Adapter(adapter_id=item) for item in adapter_ids]
        return wire.ListAdaptersResponse(adapters=adapters).SerializeToString()

    return answer


async def listed(**services: Callable[[bytes, Any], Awaitable[bytes]]) -> list[str]:
    """Return the ids of the adapters of all services."""
    lists = AdapterLists(services, base_models_of=HELD.__getitem__)
    with acting_for(Caller(tenant_id='alice', scopes=frozenset({'train'}))):
        raw = await lists(b'', CONTEXT)
    return [item.adapter_id for item in wire.ListAdaptersResponse.FromString(raw).adapters]


async def test_services_that_are_there_are_listed_together() -> None:
    """Nothing is missing, and nothing is there twice."""
    assert await listed(one=service_of('b', 'a'), two=service_of('c')) == ['c', 'b', 'a']


@pytest.mark.parametrize(
    ('away', 'base_models'),
    [(['one'], 'small'), (['two'], 'huge, large'), (['one', 'two'], 'huge, large, small'), (['three'], '')],
)
async def test_base_models_of_those_that_are_away_are_named(away: list[str], base_models: str) -> None:
    """A short list would be taken for all there is; of a service that was never heard nobody knows what it holds."""
    services = {name: service_of() if name in away else service_of(name) for name in HELD}
    with pytest.raises(BaseModelsUnreachable) as refused:
        await listed(**services)
    assert (refused.value.service, refused.value.base_models) == ('model', base_models)
    assert refused.value.retry_after is not None
