"""Authentication of signed links to archives, before and during a download."""

from datetime import timedelta
from typing import Any, cast

import pytest

from twinkle_services.gateway.http.call import HttpCall
from twinkle_services.gateway.tinker.archives import LINK_LIFETIME, ArchiveRoutes, Links
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import CredentialsInvalid


async def _unused(*_: Any) -> Any:
    raise AssertionError('the call sends nothing')


async def test_running_download_outlives_its_link_but_not_the_keys() -> None:
    """A download outlives its link but not the tenant's last valid key, and an expired link starts no download."""
    clock, tenants = FakeClock(), {'alice'}
    links = Links(b'key', clock=clock)

    async def has_valid_key(tenant_id: str) -> bool:
        return tenant_id in tenants

    *_, route = [
        route
        for route in ArchiveRoutes(cast(Any, None), links, has_valid_key=has_valid_key).routes()
        if route.identify is not None
    ]
    assert route.identify is not None
    token, _ = links.create('alice', 'twinkle://run/weights/best')

    def call() -> HttpCall:
        new = HttpCall(route=route, scope={}, receive=_unused, send=_unused, headers={}, request_id='rq')
        new.scope = {'path_params': {'token': token}}
        return new

    running = call()
    running.caller = await route.identify(running)
    assert running.caller.tenant_id == 'alice'
    clock.advance(LINK_LIFETIME + timedelta(seconds=1))
    assert (await route.identify(running)).tenant_id == 'alice'
    with pytest.raises(CredentialsInvalid):
        await route.identify(call())
    tenants.clear()
    with pytest.raises(CredentialsInvalid):
        await route.identify(running)
