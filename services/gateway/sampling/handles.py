"""Operations on sampling handles: create, find, share with copies of a client, and resolve to a version."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from twinkle_services.gateway.errors import SessionNotFound
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.sampling.convert import published_version
from twinkle_services.gateway.sampling.rules import HandleRequest, SamplingHandle
from twinkle_services.gateway.sampling.sql import SqlHandleStore
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import Code, DomainError, InvalidField, RequestIdReused, ServiceUnreachable

PublishedResult = Callable[[str], Awaitable[bytes | None]]
"""Waits up to a minute for a future of the current caller, given by id. Returns the result, None if the future is not
finished, or raises the DomainError that the future failed with."""
_CACHE_SIZE = 4096
_PINNED_SNAPSHOTS = 32
"""Number of newest versions per session and adapter that stay pinned; the number of pins is limited."""
_UNPINNED_AT_ONCE = 4
"""Maximum number of versions to unpin per new version: usually one, and more after failed attempts."""

_log = structlog.get_logger('sampling')


class SamplingHandles:
    """Sampling handles of the current caller. The weights of a resolved handle never change, so it is cached.

    Concurrency: use it from one event loop.
    """

    def __init__(
        self,
        store: SqlHandleStore,
        lookups: GrpcLookups,
        published: PublishedResult,
        *,
        caller: Callable[[], Caller],
        clock: Clock,
    ) -> None:
        self._store = store
        self._lookups = lookups
        self._published = published
        self._caller = caller
        self._clock = clock
        self._cache: OrderedDict[tuple[str, str], SamplingHandle] = OrderedDict()

    async def open(self, request: HandleRequest) -> SamplingHandle:
        """Create a handle, or return the handle that an equal request created.

        Raises:
            RequestIdReused: a handle with this id and different content exists.
            DomainError: the saved weights do not exist, cannot be looked up, or have a different base model.
        """
        base_model = request.base_model
        if request.checkpoint_path:
            base_model = (await self._lookups.checkpoint(request.checkpoint_path)).base_model
            if request.base_model not in ('', base_model):
                raise InvalidField('base_model', f'must be {base_model!r} for these weights, or be empty')
        handle = SamplingHandle(
            handle_id=request.handle_id,
            tenant_id=self._caller().tenant_id,
            session_id=request.session_id,
            base_model=base_model,
            checkpoint_path=request.checkpoint_path,
            adapter_id=request.adapter_id,
            future_id=request.future_id,
            is_inflight=request.is_inflight,
            create_time=self._clock.now(),
        )
        stored = await self._store.add_if_absent(handle)
        if not stored.is_same_as(handle):
            raise RequestIdReused(request.handle_id)
        return stored

    async def get(self, handle_id: str) -> SamplingHandle:
        """Return a handle; its base model and version may be unknown.

        Raises:
            SessionNotFound: the caller has no such handle.
        """
        key = (self._caller().tenant_id, handle_id)
        if cached := self._cache.get(key):
            self._cache.move_to_end(key)
            return cached
        found = await self._store.get(*key)
        if found is None:
            raise SessionNotFound(handle_id)
        self._add_to_cache(found)
        return found

    async def join(self, handle_id: str) -> int:
        """Count one more copy of a handle's client, and return the number of copies.

        Raises:
            SessionNotFound: the caller has no such handle.
        """
        number = await self._store.count_clone(self._caller().tenant_id, handle_id)
        if number is None:
            raise SessionNotFound(handle_id)
        return number

    async def with_base(self, handle_id: str) -> SamplingHandle:
        """Return a handle with its base model.

        Raises:
            SessionNotFound: the caller has no such handle.
            DomainError: the handle's adapter cannot be looked up.
        """
        handle = await self.get(handle_id)
        if handle.base_model:
            return handle
        adapter = await self._lookups.adapter(handle.adapter_id)
        return await self._settle(replace(handle, base_model=adapter.base_model))

    async def resolved(self, handle_id: str) -> SamplingHandle:
        """Return a handle with its base model and version; wait up to a minute for the version to be published.

        Raises:
            SessionNotFound: the caller has no such handle.
            FutureExpired: the version was published so long ago that the result of the publishing future is deleted.
            ServiceUnreachable: the version is not published yet; retry.
            DomainError: the publishing future failed, or the handle's adapter cannot be looked up.
        """
        handle = await self.get(handle_id)
        if handle.is_version_due:
            result = await self._published(handle.future_id)
            if result is None:
                raise ServiceUnreachable('model')
            handle = await self.record_published(handle_id, result)
        return handle if handle.base_model else await self.with_base(handle_id)

    async def record_published(self, handle_id: str, result: bytes) -> SamplingHandle:
        """Store the version from the result of a handle's future, and return the handle.

        Raises:
            SessionNotFound: the caller has no such handle.
        """
        handle = await self.get(handle_id)
        if not handle.is_version_due:
            return handle
        published = await self._settle(replace(handle, version=published_version(result)))
        if not published.is_inflight:
            await self._unpin_old(published)
        return published

    async def unpin_session(self, session_id: str) -> None:
        """Unpin all versions that were pinned for the handles of a session of the caller.

        Raises:
            DomainError: a version could not be unpinned; the call may be repeated.
        """
        for handle in await self._store.list_of_session(self._caller().tenant_id, session_id):
            if handle.adapter_id and handle.version is not None and not handle.is_inflight:
                await self._unpin(handle.adapter_id, handle.version)

    async def _unpin_old(self, handle: SamplingHandle) -> None:
        """Unpin some versions that are older than the newest `_PINNED_SNAPSHOTS` of the adapter; log failures."""
        handles = await self._store.list_of_session(handle.tenant_id, handle.session_id)
        snapshots = [item for item in handles if item.adapter_id == handle.adapter_id and not item.is_inflight]
        versions = sorted(item.version for item in snapshots if item.version is not None)
        for version in versions[:-_PINNED_SNAPSHOTS][-_UNPINNED_AT_ONCE:]:
            try:
                await self._unpin(handle.adapter_id, version)
            except DomainError as error:
                _log.warning('version stays pinned', adapter=handle.adapter_id, version=version, error=str(error))

    async def _unpin(self, adapter_id: str, version: int) -> None:
        try:
            await self._lookups.unpin(adapter_id, version)
        except DomainError as error:
            # A version that no longer exists needs no unpinning.
            if error.code is not Code.NOT_FOUND:
                raise

    async def _settle(self, handle: SamplingHandle) -> SamplingHandle:
        await self._store.settle(
            handle.tenant_id, handle.handle_id, base_model=handle.base_model, version=handle.version
        )
        self._add_to_cache(handle)
        return handle

    def _add_to_cache(self, handle: SamplingHandle) -> None:
        if handle.is_version_due or not handle.base_model:
            return
        self._cache[handle.tenant_id, handle.handle_id] = handle
        if len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
