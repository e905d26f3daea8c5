"""Tenants share the concurrent calls of a server, and no tenant can use all of them."""

from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import QueueFull
from twinkle_services.kit.rpc.call import Call
from twinkle_services.kit.rpc.layers import Layer, share_calls


async def _fill(share: Layer, stack: AsyncExitStack, tenant_id: str, *, is_internal: bool = False) -> int:
    """Start calls of a tenant until one is refused or thirty run; return their number."""
    for count in range(30):
        call = Call('/x', cast(Any, None), caller=Caller(tenant_id=tenant_id, is_internal=is_internal))
        try:
            await stack.enter_async_context(share(call))
        except QueueFull:
            return count
    return 30


async def test_tenants_share_the_calls() -> None:
    """The first tenant gets half of the calls, and each later tenant gets half of the rest, but at least one call."""
    share = share_calls(16)
    async with AsyncExitStack() as stack:
        assert [await _fill(share, stack, name) for name in ('flood', 'second', 'third', 'fourth')] == [8, 4, 2, 1]


async def test_completed_calls_are_available_again() -> None:
    """Calls that completed no longer count for their tenant."""
    share = share_calls(4)
    for _ in range(3):
        async with AsyncExitStack() as stack:
            assert await _fill(share, stack, 'flood') == 2


async def test_calls_between_services_are_not_refused() -> None:
    """Internal calls are not limited, because the gateway has counted their tenants."""
    async with AsyncExitStack() as stack:
        assert await _fill(share_calls(4), stack, '', is_internal=True) == 30


async def test_refusal_has_a_retry_time() -> None:
    """A refused call raises QueueFull with a retry time."""
    share = share_calls(2)
    async with AsyncExitStack() as stack:
        await _fill(share, stack, 'flood')
        with pytest.raises(QueueFull) as caught:
            await stack.enter_async_context(share(Call('/x', cast(Any, None), caller=Caller(tenant_id='flood'))))
    assert caught.value.retry_after
