"""Bytes in memory: bounded for each tenant and for all, given out fairly, and given back whatever happens."""

import asyncio

import pytest

from services.kit.byte_gate import ByteGate
from services.kit.errors import BytesFull

KIB = 1 << 10
MIB = 1 << 20


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def filled(gate: ByteGate, tenant_id: str) -> int:
    """Return how many times a tenant can take a MiB."""
    for count in range(1000):
        try:
            await gate.take(tenant_id, MIB)
        except BytesFull:
            return count
    raise AssertionError('nothing bounds it')


async def test_tenant_beyond_its_bytes_waits_and_is_refused() -> None:
    """What finds no room in time is refused and leaves nothing behind; another tenant is served meanwhile."""
    gate = ByteGate(tenant_bytes=16 * MIB, total_bytes=64 * MIB, wait_seconds=0)
    await gate.take('alice', 15 * MIB)
    with pytest.raises(BytesFull):
        await gate.take('alice', MIB)
    await gate.take('bob', 15 * MIB)
    gate.give_back('alice', 15 * MIB)
    await gate.take('alice', 15 * MIB)
    assert gate.held_bytes == 30 * MIB


async def test_some_room_is_left_for_small_ones() -> None:
    """A tenant that has all it may of large bodies still polls; so do all others."""
    gate = ByteGate(tenant_bytes=16 * MIB, total_bytes=64 * MIB, wait_seconds=0)
    for tenant_id in ('a', 'b', 'c', 'd', 'e'):
        assert await filled(gate, tenant_id) <= 15
    for tenant_id in ('a', 'b', 'f'):
        await gate.take(tenant_id, 64 * KIB)
    assert gate.held_bytes <= 60 * MIB + 3 * 64 * KIB


async def test_few_tenants_never_have_all() -> None:
    """Each takes no more than it leaves free, so that the next one finds something."""
    gate = ByteGate(tenant_bytes=64 * MIB, total_bytes=64 * MIB, wait_seconds=0)
    counts = [await filled(gate, tenant_id) for tenant_id in ('a', 'b', 'c')]
    assert counts[0] > counts[1] > counts[2] > 4


async def test_those_that_wait_go_on_in_turn_as_bytes_come_free() -> None:
    """The tenant that holds least first, one tenant's in their order; nobody waits while there is room."""
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


async def test_hold_gives_back_all_it_took_also_when_it_is_cut_off() -> None:
    """A call that is cancelled while it waits, or at the moment it is let in, leaves the gate as it was."""
    gate = ByteGate(tenant_bytes=4 * MIB, total_bytes=16 * MIB, wait_seconds=None)
    first, second = gate.hold('alice'), gate.hold('alice')
    await first.grow(3 * MIB)
    waiting = asyncio.create_task(second.grow(MIB))
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    let_in = asyncio.create_task(second.grow(MIB))
    await settle()
    first.release()
    let_in.cancel()
    await asyncio.gather(let_in, return_exceptions=True)
    second.release()
    assert gate.held_bytes == 0


async def test_what_is_larger_than_all_room_goes_alone() -> None:
    """It counts as all that its tenant may have, and does not wait for ever."""
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


async def test_hold_that_is_released_while_it_waits_keeps_nothing() -> None:
    """What it waited for comes when nobody would give it back any more."""
    gate = ByteGate(tenant_bytes=16 * MIB, total_bytes=64 * MIB, wait_seconds=None)
    await gate.take('alice', 15 * MIB)
    hold = gate.hold('alice')
    growing = asyncio.ensure_future(hold.grow(8 * MIB))
    await settle()
    # Its bytes are admitted, and it is released before it goes on.
    gate.give_back('alice', 15 * MIB)
    hold.release()
    await growing
    assert gate.held_bytes == 0
