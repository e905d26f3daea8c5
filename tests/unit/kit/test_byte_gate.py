"""Byte gate: limits per tenant and in total, fair admission, and release in all cases."""

import asyncio

import pytest

from twinkle_services.kit.byte_gate import ByteGate
from twinkle_services.kit.errors import BytesFull

KIB = 1 << 10
MIB = 1 << 20


async def settle() -> None:
    """Let other tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def fill(gate: ByteGate, tenant_id: str) -> int:
    """Take one MiB at a time until the gate refuses; return the number of MiB."""
    for count in range(1000):
        try:
            await gate.take(tenant_id, MIB)
        except BytesFull:
            return count
    raise AssertionError('the gate refused no request')


async def test_tenant_over_its_limit_is_refused() -> None:
    """A large request beyond its tenant's limit for large requests is refused, and other tenants are served."""
    gate = ByteGate(tenant_bytes=16 * MIB, total_bytes=64 * MIB, wait_seconds=0)
    await gate.take('alice', 15 * MIB)
    with pytest.raises(BytesFull):
        await gate.take('alice', MIB)
    await gate.take('bob', 15 * MIB)
    gate.give_back('alice', 15 * MIB)
    await gate.take('alice', 15 * MIB)
    assert gate.held_bytes == 30 * MIB


async def test_refusal_names_the_limit_that_was_reached() -> None:
    """The error has the numbers of the tenant if its limit was reached, and the numbers of all tenants otherwise."""
    gate = ByteGate(tenant_bytes=16 * MIB, total_bytes=64 * MIB, wait_seconds=0)
    await gate.take('a', 15 * MIB)
    with pytest.raises(BytesFull) as refusal:
        await gate.take('a', 2 * MIB)
    assert (refusal.value.queue_length, refusal.value.queue_limit) == (15 * MIB, 16 * MIB)
    for tenant_id in ('b', 'c', 'd'):
        await fill(gate, tenant_id)
    held = gate.held_bytes
    with pytest.raises(BytesFull) as refusal:
        await gate.take('e', 15 * MIB)
    assert (refusal.value.queue_length, refusal.value.queue_limit) == (held, 64 * MIB)


async def test_memory_is_reserved_for_small_requests() -> None:
    """A tenant whose large bodies use all available bytes can still send small requests, and so can other tenants."""
    gate = ByteGate(tenant_bytes=16 * MIB, total_bytes=64 * MIB, wait_seconds=0)
    for tenant_id in ('a', 'b', 'c', 'd', 'e'):
        assert await fill(gate, tenant_id) <= 15
    for tenant_id in ('a', 'b', 'f'):
        await gate.take(tenant_id, 64 * KIB)
    assert gate.held_bytes <= 60 * MIB + 3 * 64 * KIB


async def test_tenants_leave_capacity_for_others() -> None:
    """Each tenant takes at most half of the free bytes, so that the next tenant can also take bytes."""
    gate = ByteGate(tenant_bytes=64 * MIB, total_bytes=64 * MIB, wait_seconds=0)
    counts = [await fill(gate, tenant_id) for tenant_id in ('a', 'b', 'c')]
    assert counts[0] > counts[1] > counts[2] > 4


async def test_waiters_are_admitted_in_order() -> None:
    """Waiters of one tenant are admitted in order as bytes are released."""
    gate = ByteGate(tenant_bytes=4 * MIB, total_bytes=8 * MIB, wait_seconds=None)
    await gate.take('alice', 3 * MIB)
    order: list[str] = []

    async def wait(name: str, tenant_id: str) -> None:
        await gate.take(tenant_id, 3 * MIB)
        order.append(name)

    tasks = [asyncio.create_task(wait(name, name[0])) for name in ('alice1', 'alice2')]
    await gate.take('a', 3 * MIB)
    await settle()
    assert order == []
    gate.give_back('a', 3 * MIB)
    await settle()
    assert order == ['alice1']
    gate.give_back('a', 3 * MIB)
    await asyncio.gather(*tasks)
    assert order == ['alice1', 'alice2']


async def test_cancelled_hold_releases_its_bytes() -> None:
    """A call that is cancelled while it waits, or when it is admitted, reserves no bytes."""
    gate = ByteGate(tenant_bytes=4 * MIB, total_bytes=16 * MIB, wait_seconds=None)
    first, second = gate.hold('alice'), gate.hold('alice')
    await first.grow(3 * MIB)
    waiting = asyncio.create_task(second.grow(MIB))
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    admitted = asyncio.create_task(second.grow(MIB))
    await settle()
    first.release()
    admitted.cancel()
    await asyncio.gather(admitted, return_exceptions=True)
    second.release()
    assert gate.held_bytes == 0


async def test_request_over_the_limit_runs_alone() -> None:
    """A request that exceeds the limit counts as the whole limit and does not wait forever."""
    gate = ByteGate(tenant_bytes=4 * MIB, total_bytes=16 * MIB, wait_seconds=0)
    hold = gate.hold('alice')
    await hold.grow(100 * MIB)
    assert gate.held_bytes == gate.largest_bytes
    await hold.grow(MIB)
    hold.shrink_to(MIB)
    assert gate.held_bytes == MIB
    hold.release()
    await hold.grow(MIB)
    assert gate.held_bytes == 0


async def test_released_hold_keeps_no_bytes() -> None:
    """Bytes that are admitted after the release of their hold are released at once."""
    gate = ByteGate(tenant_bytes=16 * MIB, total_bytes=64 * MIB, wait_seconds=None)
    await gate.take('alice', 15 * MIB)
    hold = gate.hold('alice')
    growing = asyncio.ensure_future(hold.grow(8 * MIB))
    await settle()
    # The bytes are admitted, and the hold is released before its task continues.
    gate.give_back('alice', 15 * MIB)
    hold.release()
    await growing
    assert gate.held_bytes == 0
