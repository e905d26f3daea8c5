"""The versions this sampler serves: follows adapters, stages new versions, leases them to requests.

A request gets the version it asked for or an error that says why not; never another one.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import structlog

from services.kit.caller import Caller
from services.kit.errors import AdapterNotFound, InvalidField
from services.sampler.application.fetches import Fetches
from services.sampler.application.following import Follower, Followers
from services.sampler.application.versions import Retention
from services.sampler.domain.adapter import AdapterChoice, AdapterKey, AdapterWeights, CheckpointFacts, VersionKey
from services.sampler.domain.errors import AdapterMisfit, VersionNotReady
from services.sampler.domain.residency import Residency, ResidentVersion
from services.sampler.ports import SamplerEngine, Synced, WeightSource

_log = structlog.get_logger('versions')

_LOOKUP_SECONDS = 2.0
"""What a checkpoint is now takes one question, which has this long even where a request does not want to wait."""


class VersionStore:
    """Implements `Versions` for a sampler that all adapters share: leases them and keeps them coming.

    Concurrency: for one event loop. Weights are loaded one version at a time.
    """

    def __init__(self, engine: SamplerEngine, source: WeightSource, retention: Retention | None = None) -> None:
        """Hold what `retention` allows in `engine`, taken from `source`."""
        retention = retention or Retention()
        self._engine = engine
        self._source = source
        self._residency = Residency(retention.max_versions, retention.max_bytes)
        self.followers = Followers(self._run, max_followers=retention.max_followers, idle=retention.idle)
        self._fetches = Fetches(self._admit_wanted)
        self._loading = asyncio.Lock()
        """Held while the engine's adapters change; given back by the task that changes them."""
        self._changes: set[asyncio.Task[ResidentVersion | None]] = set()
        self._listeners: list[Callable[[], None]] = []

    def start(self) -> None:
        """Do nothing: an adapter is followed once it is asked for."""

    def check_base(self) -> None:
        """Do nothing: the base model stays as it was loaded."""

    @asynccontextmanager
    async def lease(self, caller: Caller, choice: AdapterChoice) -> AsyncGenerator[ResidentVersion, None]:
        """Hold on to the version `choice` asks for; it stays loaded within this block.

        Raises:
            NotFound: no such adapter, version or checkpoint for this caller.
            VersionNotReady: it did not come within the time to wait, or there was no room for it.
            AdapterMisfit, InvalidField: it belongs to another base model.
        """
        facts: CheckpointFacts | None = None
        try:
            if choice.checkpoint_path:
                async with asyncio.timeout(max(choice.wait.total_seconds(), _LOOKUP_SECONDS)):
                    facts = await self._source.find_checkpoint(caller, choice.checkpoint_path)
            async with asyncio.timeout(choice.wait.total_seconds()):
                version = await self._find(caller, choice, facts)
        except TimeoutError as error:
            raise VersionNotReady(choice.adapter_id or choice.checkpoint_path, choice.wanted_version) from error
        self._residency.use(version)
        try:
            yield version
        finally:
            self._residency.release(version)
            self._fetches.note_room()

    def resident(self, tenant_id: str) -> list[ResidentVersion]:
        """Return what is held for a tenant, by adapter and version."""
        return self._residency.of_tenant(tenant_id)

    def all_resident(self) -> list[ResidentVersion]:
        """Return what is held for everybody, the most recently used first."""
        return self._residency.all()

    def newest(self, adapter: AdapterKey) -> ResidentVersion | None:
        """Return the newest version held of an adapter."""
        return self._residency.newest(adapter)

    def get(self, key: VersionKey) -> ResidentVersion | None:
        """Return a version if it is held."""
        return self._residency.get(key)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called whenever what is held has changed."""
        self._listeners.append(listener)

    async def unload(self, caller: Caller, adapter_id: str) -> None:
        """Stop following an adapter and drop its versions; those in use leave when they are needed no more.

        Raises:
            AdapterNotFound: nothing of it is here.
        """
        adapter = AdapterKey(caller.tenant_id, adapter_id)
        if adapter not in self.followers and not self._residency.versions_of(adapter):
            raise AdapterNotFound(adapter_id)
        await self.followers.stop(adapter)
        await self._loading.acquire()
        await self._change(self._forget(adapter))

    async def close(self) -> None:
        """Stop following everything; what the engine is doing about its adapters is finished."""
        await self.followers.close()
        await self._fetches.close()
        if self._changes:
            await asyncio.wait(self._changes)

    async def _find(self, caller: Caller, choice: AdapterChoice, facts: CheckpointFacts | None) -> ResidentVersion:
        while True:
            version = await (self._checkpoint(caller, facts) if facts else self._version(caller, choice))
            # Between the end of a fetch and now others may have needed its room.
            if self._residency.get(version.key) is version:
                return version

    async def _version(self, caller: Caller, choice: AdapterChoice) -> ResidentVersion:
        adapter = AdapterKey(caller.tenant_id, choice.adapter_id)
        if choice.exact and (resident := self._residency.get(VersionKey(adapter, choice.exact))):
            self.followers.touch(adapter)
            return resident
        while True:
            with self.followers.following(caller, adapter) as follower:
                key = VersionKey(adapter, choice.exact or follower.newest)
                if 0 < key.version <= follower.newest and key.version >= (choice.at_least or 0):
                    return self._residency.get(key) or await self._bring(caller, key)
                await follower.wait_for_change()

    async def _checkpoint(self, caller: Caller, facts: CheckpointFacts) -> ResidentVersion:
        key = facts.version_key(caller.tenant_id)
        resident = self._residency.get(key)
        return resident or await self._fetches.join(key, lambda: self._source.fetch_checkpoint(caller, facts.path))

    async def _bring(self, caller: Caller, key: VersionKey) -> ResidentVersion:
        """Bring back a version that has left this sampler or was skipped by its stream."""
        return await self._fetches.join(key, lambda: self._source.fetch(caller, key.adapter.name, key.version))

    async def _run(self, caller: Caller, adapter: AdapterKey, follower: Follower) -> None:
        held = self._residency.newest(adapter)
        announced = held.key.version if held else 0
        async with aclosing(self._source.follow(caller, adapter.name, held.weights if held else None)) as updates:
            async for update in updates:
                if isinstance(update, Synced):
                    follower.announce(announced, is_synced=True)
                    continue
                announced = update.version
                # Where there is no room it is fetched when a request wants it: the stream holds up nobody.
                await self._try_admit(VersionKey(adapter, announced), update)
                follower.announce(announced)

    async def _try_admit(self, key: VersionKey, weights: AdapterWeights) -> ResidentVersion | None:
        """Load a version if there is room, or can be made; None where everything held is in use."""
        self._check(weights)
        await self._loading.acquire()
        return await self._change(self._load(key, weights))

    async def _admit_wanted(self, key: VersionKey, weights: AdapterWeights) -> ResidentVersion | None:
        """Load what a request wants, which counts as a use of it: the request may come back for it."""
        version = await self._try_admit(key, weights)
        if version is not None:
            self._residency.touch(version)
        return version

    async def _change(self, change: Coroutine[Any, Any, ResidentVersion | None]) -> ResidentVersion | None:
        """Have the engine's adapters changed, to the end whatever becomes of the caller, who has taken the lock.

        Else a caller that goes away halfway would leave versions in the engine that nobody here knows of.
        """

        async def run() -> ResidentVersion | None:
            try:
                return await change
            finally:
                self._loading.release()

        task = asyncio.create_task(run(), name='change the adapters')
        self._changes.add(task)
        task.add_done_callback(self._note_end)
        return await asyncio.shield(task)

    def _note_end(self, task: asyncio.Task[ResidentVersion | None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Told to who waits, if anybody still does.
            _log.info('the adapters could not be changed', error=str(error))

    async def _load(self, key: VersionKey, weights: AdapterWeights) -> ResidentVersion | None:
        if resident := self._residency.get(key):
            return resident
        leaving = self._residency.make_room(weights.size_bytes)
        if leaving is None:
            return None
        for left in leaving:
            await self._drop(left, keep=key.adapter)
        await self._engine.load_adapter(key, weights)
        version = ResidentVersion(key=key, size_bytes=weights.size_bytes, digest=weights.digest, weights=weights)
        self._residency.add(version)
        self._tell()
        return version

    async def _forget(self, adapter: AdapterKey) -> None:
        for key in self._residency.forget_idle(adapter):
            await self._engine.unload_adapter(key)
        self._tell()

    def _check(self, weights: AdapterWeights) -> None:
        """Refuse what can never be served here.

        Raises:
            InvalidField: it belongs to another base model.
            AdapterMisfit: it is no adapter, or larger than all the memory for adapters.
        """
        if weights.base_model != self._engine.facts.base_model:
            raise InvalidField('adapter', f'belongs to base model {weights.base_model!r}')
        if weights.lora_config is None:
            needs = "to be a LoRA adapter; these are the base model's own weights, of a full-parameter run"
            raise AdapterMisfit(weights.adapter_id, needs)
        if weights.size_bytes > self._residency.max_bytes:
            needs = f'{weights.size_bytes} bytes of memory, and {self._residency.max_bytes} are for adapters here'
            raise AdapterMisfit(weights.adapter_id, needs)

    async def _drop(self, key: VersionKey, *, keep: AdapterKey) -> None:
        """Unload a version; an adapter none of whose versions is left is followed no more."""
        await self._engine.unload_adapter(key)
        if key.adapter != keep and not self._residency.versions_of(key.adapter):
            self.followers.stop_idle(key.adapter)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
