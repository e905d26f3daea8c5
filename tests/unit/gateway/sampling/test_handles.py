"""Sampling handles: their content, the version to which they resolve, and the versions that they keep pinned."""

from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from twinkle.api.model.v1 import operation_result_pb2, training_service_pb2
from twinkle_services.gateway.sampling.handles import SamplingHandles
from twinkle_services.gateway.sampling.rules import HandleRequest, SamplingHandle
from twinkle_services.gateway.sampling.sql import SqlHandleStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import ServiceUnreachable, VersionNotFound

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


async def not_published(future_id: str) -> None:
    """Return no result, as for a future that is not finished."""
    del future_id


@dataclass
class Lookups:
    """Fake of `GrpcLookups` that records unpinned versions. All checkpoints have the base model 'tiny'."""

    unpinned: list[int] = field(default_factory=list[int])

    async def checkpoint(self, path: str) -> Any:
        """Return a checkpoint with its base model."""
        assert path
        return SimpleNamespace(base_model='tiny')

    async def unpin(self, adapter_id: str, version: int) -> None:
        """Record the version; the first attempt fails if the version is divisible by 3."""
        if version % 3 == 0 and version not in self.unpinned:
            self.unpinned.append(version)
            raise ServiceUnreachable('checkpoint')
        assert adapter_id == HANDLE.adapter_id
        self.unpinned.append(version)


async def handles_of(database: Database, *items: SamplingHandle, lookups: Any = None) -> SamplingHandles:
    """Store `items`, and return the operations on them."""
    store = SqlHandleStore(database)
    for item in items:
        await store.add_if_absent(item)
    return SamplingHandles(store, lookups or Lookups(), not_published, caller=lambda: ALICE, clock=FakeClock())


async def test_new_handle_has_the_content_of_its_request(database: Database) -> None:
    """A new handle has each field of its request, the base model of the weights, and the caller's tenant."""
    handles = await handles_of(database)
    request = HandleRequest(
        handle_id='s:sample:0',
        session_id='s',
        checkpoint_path='twinkle://s/weights',
        adapter_id='s:train:0',
        future_id='fu-1',
        is_inflight=True,
    )
    opened = await handles.open(request)
    facts = {item.name: getattr(opened, item.name) for item in fields(request)}
    assert HandleRequest(**facts) == replace(request, base_model='tiny')
    assert (opened.tenant_id, opened.create_time) == ('alice', FakeClock().now())


async def test_unpublished_version_is_an_error_that_the_client_may_retry(database: Database) -> None:
    """Resolving a handle fails with ServiceUnreachable if its version is not published in time."""
    handles = await handles_of(database, HANDLE)
    with pytest.raises(ServiceUnreachable):
        await handles.resolved(HANDLE.handle_id)


@pytest.mark.parametrize('is_inflight', [False, True])
async def test_old_snapshots_are_unpinned(database: Database, *, is_inflight: bool) -> None:
    """All but the newest 32 snapshots are unpinned, even after a failed attempt; in-flight handles pin nothing."""
    lookups = Lookups()
    items = [
        replace(HANDLE, handle_id=f's:sample:{index}', future_id=f'fu-{index}', is_inflight=is_inflight)
        for index in range(40)
    ]
    handles = await handles_of(database, *items, lookups=lookups)
    for index, item in enumerate(items):
        publish = operation_result_pb2.PublishResult(version=index + 1)
        result = operation_result_pb2.OperationResult(publish=publish)
        response = training_service_pb2.ExecuteResponse(result=result)
        await handles.record_published(item.handle_id, response.SerializeToString())
    assert set(lookups.unpinned) == (set() if is_inflight else set(range(1, 9)))
    assert all(lookups.unpinned.count(version) > 1 for version in lookups.unpinned if version % 3 == 0)


async def test_versions_of_a_finished_session_are_unpinned(database: Database) -> None:
    """Only versions of the session are unpinned; failures can be retried, and deleted versions are ignored."""
    lookups = Lookups()
    items = [
        replace(HANDLE, handle_id=f's:sample:{index}', version=index + 1, future_id=f'fu-{index}') for index in range(4)
    ]
    other_session = replace(HANDLE, handle_id='other:sample:0', session_id='other', version=50)
    base = replace(HANDLE, handle_id='s:sample:9', adapter_id='', future_id='')
    inflight = replace(HANDLE, handle_id='s:sample:10', version=60, is_inflight=True)
    handles = await handles_of(database, *items, other_session, base, inflight, lookups=lookups)
    with pytest.raises(ServiceUnreachable):
        await handles.unpin_session('s')
    await handles.unpin_session('s')
    assert set(lookups.unpinned) == {1, 2, 3, 4}
    lookups.unpin = _raise_not_found
    await handles.unpin_session('s')


async def _raise_not_found(adapter_id: str, version: int) -> None:
    raise VersionNotFound(adapter_id, version)
