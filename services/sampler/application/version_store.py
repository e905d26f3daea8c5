"""The versions this sampler serves: follows adapters, stages new versions, leases them to requests.

A request gets the version it asked for or an error that says why not; never another one.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import structlog

from services.kit.caller import Caller
from services.kit.errors import AdapterNotFound, InvalidField
from services.sampler.domain.adapter import AdapterChoice, AdapterKey, AdapterWeights, VersionKey
from services.sampler.domain.errors import VersionNotReady
from services.sampler.domain.residency import Residency, ResidentVersion
from services.sampler.ports import SamplerEngine, Synced, WeightSource

_log = structlog.get_logger('versions')


class _Follower:
    """One adapter's stream of versions."""

    def __init__(self) -> None:
        self.newest = 0
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Wait for a newer version or the end of the stream.

        Raises:
            DomainError: what the stream ended with.
        """
        if not self._is_done():
            await self._changed.wait()
        if self.task is not None and self._is_done() and not self.task.cancelled():
            self.task.result()

    def _is_done(self) -> bool:
        return self.task is not None and self.task.done()


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.info('no longer following', task=task.get_name(), error=str(error))


class VersionStore:
    """Leases versions and keeps them coming.

    Concurrency: for one event loop. Weights are loaded one version at a time.
    """

    def __init__(self, engine: SamplerEngine, source: WeightSource, *, max_versions: int) -> None:
        """Hold at most `max_versions` in `engine`, taken from `source`."""
        self._engine = engine
        self._source = source
        self._residency = Residency(max_versions)
        self._followers: dict[AdapterKey, _Follower] = {}
        self._loading = asyncio.Lock()
        self._released = asyncio.Event()

    @asynccontextmanager
    async def lease(self, caller: Caller, choice: AdapterChoice) -> AsyncGenerator[ResidentVersion, None]:
        """Hold on to the version `choice` asks for; it stays loaded within this block.

        Raises:
            NotFound: no such adapter, version or checkpoint for this caller.
            VersionNotReady: it did not come within the time to wait.
            AdapterMisfit, InvalidField: it belongs to another base model.
        """
        try:
            async with asyncio.timeout(choice.wait.total_seconds()):
                version = await self._find(caller, choice)
        except TimeoutError as error:
            raise VersionNotReady(choice.adapter_id or choice.checkpoint_path, choice.wanted_version) from error
        self._residency.use(version)
        try:
            yield version
        finally:
            self._residency.release(version)
            self._released.set()

    def resident(self, tenant_id: str) -> list[ResidentVersion]:
        """Return what is held for a tenant, by adapter and version."""
        return self._residency.of_tenant(tenant_id)

    async def unload(self, caller: Caller, adapter_id: str) -> None:
        """Stop following an adapter and drop its versions; those in use leave when they are needed no more.

        Raises:
            AdapterNotFound: nothing of it is here.
        """
        adapter = AdapterKey(caller.tenant_id, adapter_id)
        if adapter not in self._followers and not self._residency.versions_of(adapter):
            raise AdapterNotFound(adapter_id)
        await self._stop_following(adapter)
        for key in self._residency.forget_idle(adapter):
            await self._engine.unload_adapter(key)

    async def close(self) -> None:
        """Stop following everything."""
        for adapter in list(self._followers):
            await self._stop_following(adapter)

    async def _find(self, caller: Caller, choice: AdapterChoice) -> ResidentVersion:
        if choice.checkpoint_path:
            return await self._find_checkpoint(caller, choice.checkpoint_path)
        adapter = AdapterKey(caller.tenant_id, choice.adapter_id)
        while True:
            follower = self._follow(caller, adapter)
            version = choice.exact or follower.newest
            if resident := self._residency.get(VersionKey(adapter, version)):
                if version >= (choice.at_least or 0):
                    return resident
            elif version and version <= follower.newest:
                return await self._fetch(caller, VersionKey(adapter, version))
            await follower.wait_for_change()

    async def _find_checkpoint(self, caller: Caller, path: str) -> ResidentVersion:
        facts = await self._source.find_checkpoint(caller, path)
        key = facts.version_key(caller.tenant_id)
        if resident := self._residency.get(key):
            return resident
        return await self._admit(key, await self._source.fetch_checkpoint(caller, path))

    async def _fetch(self, caller: Caller, key: VersionKey) -> ResidentVersion:
        """Bring back a version that has left this sampler or was skipped by its stream."""
        return await self._admit(key, await self._source.fetch(caller, key.adapter.name, key.version))

    def _follow(self, caller: Caller, adapter: AdapterKey) -> _Follower:
        """Return the adapter's follower, begun if there is none."""
        follower = self._followers.get(adapter)
        if follower is None:
            follower = self._followers[adapter] = _Follower()
            follower.task = asyncio.create_task(self._run(caller, adapter, follower), name=f'follow {adapter}')
            follower.task.add_done_callback(_log_end)
        return follower

    async def _run(self, caller: Caller, adapter: AdapterKey, follower: _Follower) -> None:
        try:
            async with aclosing(self._source.follow(caller, adapter.name, 0)) as updates:
                async for update in updates:
                    if not isinstance(update, Synced):
                        await self._admit(VersionKey(adapter, update.version), update)
                        follower.newest = update.version
                        follower.notify()
        finally:
            if self._followers.get(adapter) is follower:
                del self._followers[adapter]
            # The task is done only after this callback; waiters look at it when they wake up.
            asyncio.get_running_loop().call_soon(follower.notify)

    async def _admit(self, key: VersionKey, weights: AdapterWeights) -> ResidentVersion:
        """Load a version, making room first; the version is served from the moment this returns."""
        if weights.base_model != self._engine.facts.base_model:
            raise InvalidField('adapter', f'belongs to base model {weights.base_model!r}')
        async with self._loading:
            if resident := self._residency.get(key):
                return resident
            for leaving in await self._make_room():
                await self._drop(leaving, keep=key.adapter)
            await self._engine.load_adapter(key, weights)
            version = ResidentVersion(key=key, size_bytes=weights.size_bytes, digest=weights.digest)
            self._residency.add(version)
            return version

    async def _make_room(self) -> list[VersionKey]:
        while (leaving := self._residency.make_room()) is None:
            self._released.clear()
            await self._released.wait()
        return leaving

    async def _drop(self, key: VersionKey, *, keep: AdapterKey) -> None:
        """Unload a version; an adapter none of whose versions is left is followed no more."""
        await self._engine.unload_adapter(key)
        if key.adapter != keep and not self._residency.versions_of(key.adapter):
            await self._stop_following(key.adapter)

    async def _stop_following(self, adapter: AdapterKey) -> None:
        follower = self._followers.pop(adapter, None)
        if follower is None or follower.task is None:
            return
        follower.task.cancel()
        await asyncio.wait([follower.task])
