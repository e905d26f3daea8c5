"""One tenant cannot take all calls that a server has, and the last one is never anybody's alone."""

from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from services.kit.caller import Caller
from services.kit.errors import QueueFull
from services.kit.rpc.call import Call
from services.kit.rpc.layers import Layer, share_calls


async def _fill(share: Layer, stack: AsyncExitStack, tenant_id: str, *, is_internal: bool = False) -> int:
    """Begin calls of a tenant until one is refused, or thirty; return how many there are."""
    for count in range(30):
        call = Call('/x', cast(Any, None), caller=Caller(tenant_id=tenant_id, is_internal=is_internal))
        try:
            await stack.enter_async_context(share(call))
        except QueueFull:
            return count
    return 30


async def test_tenants_share_what_there_is() -> None:
    """One that floods the server gets half; each that comes after it half of what is left, and a call at least."""
    share = share_calls(16)
    async with AsyncExitStack() as stack:
        assert [await _fill(share, stack, name) for name in ('flood', 'second', 'third', 'fourth')] == [8, 4, 2, 1]


async def test_calls_that_ended_are_free_again() -> None:
    """Nothing of them is remembered."""
    share = share_calls(4)
    for _ in range(3):
        async with AsyncExitStack() as stack:
            assert await _fill(share, stack, 'flood') == 2


async def test_calls_between_services_are_not_refused() -> None:
    """They are for tenants that were counted where they came in."""
    async with AsyncExitStack() as stack:
        assert await _fill(share_calls(4), stack, '', is_internal=True) == 30


async def test_a_refusal_says_when_to_come_again() -> None:
    """Code, numbers and time are those of a full queue."""
    share = share_calls(2)
    async with AsyncExitStack() as stack:
        await _fill(share, stack, 'flood')
        with pytest.raises(QueueFull) as caught:
            await stack.enter_async_context(share(Call('/x', cast(Any, None), caller=Caller(tenant_id='flood'))))
    assert caught.value.retry_after
