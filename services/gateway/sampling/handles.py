"""The verbs of sampling handles: made, found, joined by copies of a client, and resolved to a version."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from services.gateway.errors import SessionNotFound
from services.gateway.futures.ports import Futures
from services.gateway.sampling.handle import SamplingHandle
from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.errors import Code, DomainError, InvalidField, RequestIdReused, ServiceUnreachable

_log = structlog.get_logger('sampling')

_REMEMBERED = 4096
_KEPT_SNAPSHOTS = 32
"""Handles of a session's adapter that mean exactly one version and keep it: the newest. Pins of an adapter are few."""
_UNPINNED_AT_ONCE = 4
"""One leaves for each that comes; more where an attempt failed before."""
_TURN_SECONDS = 60.0
"""How long one attempt waits for a version to be published."""


class HandleStore(Protocol):
    """Keeps sampling handles. Their ids are unique within a tenant."""

    async def add_if_absent(self, handle: SamplingHandle) -> SamplingHandle:
        """Keep the handle, or leave the tenant's one of that id as it is; return what is kept."""
        ...

    async def get(self, tenant_id: str, handle_id: str) -> SamplingHandle | None:
        """Return the tenant's handle, or None."""
        ...

    async def settle(self, tenant_id: str, handle_id: str, *, base_model: str, version: int | None) -> None:
        """Keep what was learnt of a handle, '' or None for nothing; what is known already stays.

        One that is not there is no error.
        """
        ...

    async def count_clone(self, tenant_id: str, handle_id: str) -> int | None:
        """Count one more copy of a handle's client and return how many there are now; None if there is no handle."""
        ...

    async def list_of_session(self, tenant_id: str, session_id: str) -> Sequence[SamplingHandle]:
        """Return the handles of a session, oldest first."""
        ...


class WeightFacts(Protocol):
    """Knows of weights what other services tell, on behalf of the current caller."""

    async def base_of_adapter(self, adapter_id: str) -> str:
        """Return an adapter's base model.

        Raises:
            DomainError: the service's own error, or ServiceUnreachable.
        """
        ...

    async def base_of_checkpoint(self, checkpoint_path: str) -> str:
        """Return the base model of saved weights, by our own path; it raises as `base_of_adapter` does."""
        ...

    def version_of(self, result: bytes) -> int:
        """Return the version that a future published, of its result."""
        ...

    async def unpin(self, adapter_id: str, version: int) -> None:
        """Let a version that was published pinned leave the ring in its turn; it raises as `base_of_adapter` does."""
        ...


@dataclass(frozen=True, kw_only=True)
class HandleOrder:
    """What a handle is asked for. With neither a checkpoint nor an adapter it is the base model alone."""

    handle_id: str
    session_id: str
    base_model: str = ''
    """Empty: that of the weights."""
    checkpoint_path: str = ''
    adapter_id: str = ''
    future_id: str = ''
    is_inflight: bool = False


class SamplingHandles:
    """Knows the handles of the current caller. For one event loop.

    One that is resolved never changes, so it is remembered.
    """

    def __init__(
        self,
        store: HandleStore,
        weights: WeightFacts,
        futures: Futures,
        *,
        caller: Callable[[], Caller],
        clock: Clock,
    ) -> None:
        """Keep them in `store`; `futures` publish versions, and `weights` tells of base models."""
        self._store = store
        self._weights = weights
        self._futures = futures
        self._caller = caller
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], SamplingHandle] = OrderedDict()

    async def open(self, order: HandleOrder) -> SamplingHandle:
        """Make a handle, or return the one that was made by the same order.

        Raises:
            RequestIdReused: the id is another handle's.
            DomainError: the saved weights are not there, or cannot be looked up.
        """
        base_model = order.base_model
        if order.checkpoint_path:
            base_model = await self._weights.base_of_checkpoint(order.checkpoint_path)
            if order.base_model not in ('', base_model):
                raise InvalidField('base_model', f'is {order.base_model[:100]!r}, the weights are of {base_model!r}')
        handle = SamplingHandle(
            handle_id=order.handle_id,
            tenant_id=self._caller().tenant_id,
            session_id=order.session_id,
            base_model=base_model,
            checkpoint_path=order.checkpoint_path,
            adapter_id=order.adapter_id,
            future_id=order.future_id,
            is_inflight=order.is_inflight,
            create_time=self._clock.now(),
        )
        kept = await self._store.add_if_absent(handle)
        if not kept.is_same_as(handle):
            raise RequestIdReused(order.handle_id)
        return kept

    async def get(self, handle_id: str) -> SamplingHandle:
        """Return a handle, as much as is known of it.

        Raises:
            SessionNotFound: the caller has no such handle.
        """
        key = (self._caller().tenant_id, handle_id)
        if known := self._known.get(key):
            self._known.move_to_end(key)
            return known
        found = await self._store.get(*key)
        if found is None:
            raise SessionNotFound(handle_id)
        self._remember(found)
        return found

    async def join(self, handle_id: str) -> int:
        """Count one more copy of a handle's client; return its number, from 1.

        Raises:
            SessionNotFound: the caller has no such handle.
        """
        number = await self._store.count_clone(self._caller().tenant_id, handle_id)
        if number is None:
            raise SessionNotFound(handle_id)
        return number

    async def with_base(self, handle_id: str) -> SamplingHandle:
        """Return a handle whose base model is known.

        Raises:
            SessionNotFound: the caller has no such handle.
            DomainError: its adapter cannot be looked up.
        """
        handle = await self.get(handle_id)
        if handle.base_model:
            return handle
        return await self._settle(replace(handle, base_model=await self._weights.base_of_adapter(handle.adapter_id)))

    async def resolved(self, handle_id: str) -> SamplingHandle:
        """Return a handle whose base model and version are known, once they are: after a minute at most.

        Raises:
            SessionNotFound: the caller has no such handle.
            FutureExpired: its version was published so long ago that nobody knows it any more.
            ServiceUnreachable: it is not published yet; asking again is right.
            DomainError: why it was not published.
        """
        handle = await self.get(handle_id)
        if handle.is_version_due:
            future = await self._futures.wait(handle.future_id, seconds=_TURN_SECONDS)
            if not future.is_finished:
                # Or this process ends, and no wait lasts any more.
                raise ServiceUnreachable('model')
            handle = await self.note_published(handle_id, await self._futures.result(future))
        return handle if handle.base_model else await self.with_base(handle_id)

    async def note_published(self, handle_id: str, result: bytes) -> SamplingHandle:
        """Keep the version that a handle's future published, and return the handle.

        Raises:
            SessionNotFound: the caller has no such handle.
        """
        handle = await self.get(handle_id)
        if not handle.is_version_due:
            return handle
        published = await self._settle(replace(handle, version=self._weights.version_of(result)))
        if not published.is_inflight:
            await self._let_old_go(published)
        return published

    async def let_session_go(self, session_id: str) -> None:
        """Unpin all that the handles of the caller's session keep: the versions leave the ring in their turn.

        Raises:
            DomainError: one could not be unpinned now; again is harmless.
        """
        for handle in await self._store.list_of_session(self._caller().tenant_id, session_id):
            if handle.adapter_id and handle.version is not None and not handle.is_inflight:
                await self._unpin(handle.adapter_id, handle.version)

    async def _let_old_go(self, handle: SamplingHandle) -> None:
        """Unpin the versions that enough newer snapshots of the same adapter have followed."""
        handles = await self._store.list_of_session(handle.tenant_id, handle.session_id)
        snapshots = [item for item in handles if item.adapter_id == handle.adapter_id and not item.is_inflight]
        versions = sorted(item.version for item in snapshots if item.version is not None)
        for version in versions[:-_KEPT_SNAPSHOTS][-_UNPINNED_AT_ONCE:]:
            try:
                await self._unpin(handle.adapter_id, version)
            except DomainError as error:
                _log.warning('version stays pinned', adapter=handle.adapter_id, version=version, error=str(error))

    async def _unpin(self, adapter_id: str, version: int) -> None:
        try:
            await self._weights.unpin(adapter_id, version)
        except DomainError as error:
            # One that is gone needs no unpinning.
            if error.code is not Code.NOT_FOUND:
                raise

    async def _settle(self, handle: SamplingHandle) -> SamplingHandle:
        await self._store.settle(
            handle.tenant_id, handle.handle_id, base_model=handle.base_model, version=handle.version
        )
        self._remember(handle)
        return handle

    def _remember(self, handle: SamplingHandle) -> None:
        if handle.is_version_due or not handle.base_model:
            return
        self._known[handle.tenant_id, handle.handle_id] = handle
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
