"""Tests of the version service over loopback, with the metadata that the gateway adds to clients' calls."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import ALICE, Running, as_tenant, failure_of, make_state, serving, until
from twinkle.api.checkpoint.v1 import version_service_pb2 as wire
from twinkle_services.kit.rpc.context import acting_for

ALICE_CALLS = as_tenant('alice')


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    """A service with a ring of three versions, which contains versions 1 to 3 of Alice's adapter."""
    async with serving(tmp_path, ring_capacity=3, pin_limit=2) as running:
        with acting_for(ALICE):
            for version in (1, 2, 3):
                await running.weights.publish_version('ad-1', make_state(version), version=version)
            yield running


async def _numbers(service: Running) -> list[int]:
    response = await service.versions.ListVersions(wire.ListVersionsRequest(adapter_id='ad-1'), metadata=ALICE_CALLS)
    return [version.version for version in response.versions]


async def _pin(service: Running, version: int) -> Any:
    return await service.versions.PinVersion(
        wire.PinVersionRequest(adapter_id='ad-1', version=version), metadata=ALICE_CALLS
    )


async def test_get_returns_the_newest_version_or_one_by_number(service: Running) -> None:
    """A version is found by its number; 0 means the newest version."""
    for requested, expected in ((0, 3), (2, 2)):
        request = wire.GetVersionRequest(adapter_id='ad-1', version=requested)
        found = (await service.versions.GetVersion(request, metadata=ALICE_CALLS)).version
        assert (found.version, found.adapter_id, found.is_pinned) == (expected, 'ad-1', False)
        assert found.digest == make_state(expected).manifest.digest
        assert found.create_time.seconds > 0


async def test_list_pages_newest_first(service: Running) -> None:
    """Versions are listed in pages, newest first, and a page token is valid for its query only."""
    request = wire.ListVersionsRequest(adapter_id='ad-1', page_size=2)
    first = await service.versions.ListVersions(request, metadata=ALICE_CALLS)
    assert [version.version for version in first.versions] == [3, 2]
    request.page_token = first.next_page_token
    second = await service.versions.ListVersions(request, metadata=ALICE_CALLS)
    assert ([version.version for version in second.versions], second.next_page_token) == ([1], '')
    request.adapter_id = 'ad-2'
    failure = await failure_of(service.versions.ListVersions(request, metadata=ALICE_CALLS))
    assert failure.reason == 'INVALID_PAGE_TOKEN'


async def test_pinned_version_stays_until_unpinned(service: Running) -> None:
    """Newer versions do not evict a pinned version, which is evicted after it is unpinned."""
    assert (await _pin(service, 1)).version.is_pinned
    for version in (4, 5):
        await service.weights.publish_version('ad-1', make_state(version), version=version)
    assert await _numbers(service) == [5, 4, 3, 1]
    assert (await service.weights.fetch_version('ad-1', 1)).state == make_state(1)
    request = wire.UnpinVersionRequest(adapter_id='ad-1', version=1)
    assert not (await service.versions.UnpinVersion(request, metadata=ALICE_CALLS)).version.is_pinned
    assert await _numbers(service) == [5, 4, 3]
    await until(lambda: len(service.stored_folders()) == 3)


async def test_pins_are_limited(service: Running) -> None:
    """The number of pinned versions is limited, and a version that is pinned again does not count twice."""
    await _pin(service, 1)
    await _pin(service, 2)
    await _pin(service, 2)
    failure = await failure_of(_pin(service, 3))
    assert (failure.code, failure.reason) == ('RESOURCE_EXHAUSTED', 'QUOTA_EXCEEDED')


async def test_only_unneeded_versions_can_be_deleted(service: Running) -> None:
    """The newest version and pinned versions cannot be deleted; a deleted version is removed from disk."""
    await _pin(service, 2)
    for version in (2, 3):
        request = wire.DeleteVersionRequest(adapter_id='ad-1', version=version)
        failure = await failure_of(service.versions.DeleteVersion(request, metadata=ALICE_CALLS))
        assert (failure.code, failure.reason) == ('FAILED_PRECONDITION', 'IN_USE')
    await service.versions.DeleteVersion(wire.DeleteVersionRequest(adapter_id='ad-1', version=1), metadata=ALICE_CALLS)
    assert await _numbers(service) == [3, 2]
    await until(lambda: len(service.stored_folders()) == 2)


REQUESTS = {
    'GetVersion': wire.GetVersionRequest,
    'ListVersions': wire.ListVersionsRequest,
    'PinVersion': wire.PinVersionRequest,
    'UnpinVersion': wire.UnpinVersionRequest,
    'DeleteVersion': wire.DeleteVersionRequest,
}


def _request(method: str, adapter_id: str, version: int) -> Any:
    fields = {'adapter_id': adapter_id} | ({} if method == 'ListVersions' else {'version': version})
    return REQUESTS[method](**fields)


@pytest.mark.parametrize('method', REQUESTS)
async def test_adapter_of_another_tenant_is_not_found(service: Running, method: str) -> None:
    """The error for another tenant's adapter equals the error for a missing adapter."""
    call = getattr(service.versions, method)
    foreign = await failure_of(call(_request(method, 'ad-1', 2), metadata=as_tenant('bob')))
    missing = await failure_of(call(_request(method, 'ad-9', 2), metadata=ALICE_CALLS))
    assert (foreign.code, foreign.reason) == ('NOT_FOUND', 'ADAPTER_NOT_FOUND')
    assert missing.message == foreign.message.replace('ad-1', 'ad-9')
    assert await _numbers(service) == [3, 2, 1]


@pytest.mark.parametrize('method', [method for method in REQUESTS if method != 'ListVersions'])
async def test_error_for_a_missing_version_contains_its_number(service: Running, method: str) -> None:
    """The metadata of the error for a missing version contains the number of the version."""
    failure = await failure_of(getattr(service.versions, method)(_request(method, 'ad-1', 9), metadata=ALICE_CALLS))
    assert (failure.code, failure.reason) == ('NOT_FOUND', 'VERSION_NOT_FOUND')
    assert failure.metadata == {'adapterId': 'ad-1', 'version': '9'}


@pytest.mark.parametrize('method', REQUESTS)
@pytest.mark.parametrize('adapter_id', ['', 'a/b', '..', 'x' * 129])
async def test_bad_adapter_ids_name_the_field(service: Running, method: str, adapter_id: str) -> None:
    """The error for an adapter id that is empty, too long or could be a path names the field."""
    failure = await failure_of(getattr(service.versions, method)(_request(method, adapter_id, 1), metadata=ALICE_CALLS))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', 'adapter_id')


@pytest.mark.parametrize('method', ['PinVersion', 'UnpinVersion', 'DeleteVersion'])
async def test_changes_need_an_exact_version_and_the_scope(service: Running, method: str) -> None:
    """A change needs a version number above 0 and the scope `train`."""
    call = getattr(service.versions, method)
    failure = await failure_of(call(_request(method, 'ad-1', 0), metadata=ALICE_CALLS))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', 'version')
    failure = await failure_of(call(_request(method, 'ad-1', 2), metadata=as_tenant('alice', scopes='sample')))
    assert (failure.code, failure.reason) == ('PERMISSION_DENIED', 'SCOPE_MISSING')


async def test_bad_paging_names_the_field(service: Running) -> None:
    """A negative page size and an invalid page token are refused."""
    request = wire.ListVersionsRequest(adapter_id='ad-1', page_size=-1)
    assert (await failure_of(service.versions.ListVersions(request, metadata=ALICE_CALLS))).field == 'page_size'
    request = wire.ListVersionsRequest(adapter_id='ad-1', page_token='x')
    failure = await failure_of(service.versions.ListVersions(request, metadata=ALICE_CALLS))
    assert failure.reason == 'INVALID_PAGE_TOKEN'
