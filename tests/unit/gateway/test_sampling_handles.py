"""Sampling handles: what they learn of their version, and which versions they keep."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from fixtures.handle_store import MemoryHandleStore
from services.gateway.futures.rules import Future, FutureState
from services.gateway.sampling.handle import SamplingHandle
from services.gateway.sampling.handles import SamplingHandles
from services.kit.caller import Caller
from services.kit.clock import FakeClock
from services.kit.errors import ServiceUnreachable, VersionNotFound

ALICE = Caller(tenant_id='alice')
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HANDLE = SamplingHandle(
    handle_id='s:sample:0',
    tenant_id='alice',
    session_id='s',
    adapter_id='s:train:0',
    future_id='fu-1',
    base_model='tiny',
    create_time=NOON,
)
FUTURE = Future(
    future_id='fu-1',
    tenant_id='alice',
    session_id='s',
    kind='execute',
    key='s:train:0:1',
    lane='s:train:0',
    position=1,
    fingerprint='',
    note='',
    topic='',
    state=FutureState.WAITING,
    create_time=NOON,
)


class StoppedFutures:
    """Futures of a process that ends: no wait lasts."""

    async def wait(self, future_id: str, *, seconds: float) -> Future:
        """Return at once."""
        del future_id, seconds
        return FUTURE


@dataclass
class Weights:
    """Knows versions by their results, and notes which are let go."""

    unpinned: list[int] = field(default_factory=list[int])

    def version_of(self, result: bytes) -> int:
        """Return the number."""
        return int(result)

    async def unpin(self, adapter_id: str, version: int) -> None:
        """Note it; the service is away now and then."""
        if version % 3 == 0 and version not in self.unpinned:
            self.unpinned.append(version)
            raise ServiceUnreachable('checkpoint')
        assert adapter_id == HANDLE.adapter_id
        self.unpinned.append(version)


async def handles_of(*items: SamplingHandle, weights: Any = None) -> SamplingHandles:
    """Return the verbs over a store that has `items`."""
    store = MemoryHandleStore()
    for item in items:
        await store.add_if_absent(item)
    futures: Any = StoppedFutures()
    return SamplingHandles(store, weights or Weights(), futures, caller=lambda: ALICE, clock=FakeClock())


async def test_a_version_that_does_not_come_is_not_waited_for_without_end() -> None:
    """Also where no wait lasts because the process ends: whoever asks gets his turn, and may ask again."""
    handles = await handles_of(HANDLE)
    with pytest.raises(ServiceUnreachable):
        await handles.resolved(HANDLE.handle_id)


@pytest.mark.parametrize('is_inflight', [False, True])
async def test_old_snapshots_let_their_versions_go(*, is_inflight: bool) -> None:
    """All but the newest 32, the failed attempts again; those in flight never had one pinned."""
    weights = Weights()
    items = [
        replace(HANDLE, handle_id=f's:sample:{place}', future_id=f'fu-{place}', is_inflight=is_inflight)
        for place in range(100)
    ]
    handles = await handles_of(*items, weights=weights)
    for place, item in enumerate(items):
        await handles.note_published(item.handle_id, str(place + 1).encode())
    assert set(weights.unpinned) == (set() if is_inflight else set(range(1, 69)))
    assert all(weights.unpinned.count(version) > 1 for version in weights.unpinned if version % 3 == 0)


async def test_a_session_that_is_over_lets_all_its_versions_go() -> None:
    """Those of its own handles alone, and the failed attempts again; one that is gone already is no failure."""
    weights = Weights()
    items = [
        replace(HANDLE, handle_id=f's:sample:{place}', version=place + 1, future_id=f'fu-{place}') for place in range(4)
    ]
    foreign = replace(HANDLE, handle_id='other:sample:0', session_id='other', version=50)
    base = replace(HANDLE, handle_id='s:sample:9', adapter_id='', future_id='')
    inflight = replace(HANDLE, handle_id='s:sample:10', version=60, is_inflight=True)
    handles = await handles_of(*items, foreign, base, inflight, weights=weights)
    with pytest.raises(ServiceUnreachable):
        await handles.let_session_go('s')
    await handles.let_session_go('s')
    assert set(weights.unpinned) == {1, 2, 3, 4}
    weights.unpin = _gone
    await handles.let_session_go('s')


async def _gone(adapter_id: str, version: int) -> None:
    raise VersionNotFound(adapter_id, version)
