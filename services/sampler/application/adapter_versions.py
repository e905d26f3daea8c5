"""The adapter versions of a shared sampler: it follows adapters, loads new versions, and leases them to requests.

A request receives either the requested version or an error with the reason, but never a different version.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import structlog

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import AdapterNotFound, InvalidField
from twinkle_services.kit.telemetry import spans
from twinkle_services.sampler.application.fetches import Fetches
from twinkle_services.sampler.application.followers import Follower, Followers
from twinkle_services.sampler.application.versions_protocol import Retention
from twinkle_services.sampler.domain.adapter import (
    AdapterChoice,
    AdapterKey,
    AdapterWeights,
    CheckpointFacts,
    VersionKey,
)
from twinkle_services.sampler.domain.errors import AdapterMisfit, VersionNotReady
from twinkle_services.sampler.domain.residency import Residency, ResidentVersion
from twinkle_services.sampler.ports import SamplerEngine, Synced, WeightSource

_log = structlog.get_logger('versions')

_LOOKUP_SECONDS = 2.0
"""Minimum timeout for looking up a checkpoint, even if the request sets a shorter wait."""


class AdapterVersions:
    """Implements `Versions` for a sampler that all adapters share.

    Concurrency: use it from one event loop only. The engine's adapters change one at a time.
    """

    def __init__(self, engine: SamplerEngine, source: WeightSource, retention: Retention | None = None) -> None:
        retention = retention or Retention()
        self._engine = engine
        self._source = source
        self._residency = Residency(retention.max_versions, retention.max_bytes)
        self.followers = Followers(self._run, max_followers=retention.max_followers, idle=retention.idle)
        self._fetches = Fetches(self._admit_requested)
        self._loading = asyncio.Lock()
        """Held while the engine's adapters change; the task that changes them releases it."""
        self._changes: set[asyncio.Task[ResidentVersion | None]] = set()
        self._listeners: list[Callable[[], None]] = []

    def start(self) -> None:
        """Do nothing: an adapter is followed from its first request on."""

    def check_base(self) -> None:
        """Do nothing: the base model is served unchanged."""

    @asynccontextmanager
    async def lease(self, caller: Caller, choice: AdapterChoice) -> AsyncGenerator[ResidentVersion, None]:
        """Keep the version that `choice` selects loaded within this block.

        An error returned by another service is raised as a `ForwardedError` with the code of the class named below.

        Raises:
            NotFound: The caller has no such adapter, version or checkpoint.
            VersionNotReady: The version did not arrive in time, or there was no capacity for it.
            DataLoss: The stored weights are damaged.
            Unavailable: The source of the weights cannot be reached.
            AdapterMisfit: The version is not a LoRA adapter that fits the base model and the memory for adapters.
            InvalidField: The version belongs to a different base model.
        """
        facts: CheckpointFacts | None = None
        try:
            if choice.checkpoint_path:
                async with asyncio.timeout(max(choice.wait.total_seconds(), _LOOKUP_SECONDS)):
                    facts = await self._source.find_checkpoint(caller, choice.checkpoint_path)
            async with asyncio.timeout(choice.wait.total_seconds()):
                version = await self._find(caller, choice, facts)
        except TimeoutError as error:
            raise VersionNotReady(choice.adapter_id or choice.checkpoint_path, choice.lowest_version) from error
        self._residency.use(version)
        try:
            yield version
        finally:
            self._residency.release(version)
            self._fetches.notify_capacity()
            if version.is_unloaded_when_idle and not version.use_count:
                self._start_change(self._unload_released(version))

    def resident(self, tenant_id: str) -> list[ResidentVersion]:
        return self._residency.of_tenant(tenant_id)

    def all_resident(self) -> list[ResidentVersion]:
        return self._residency.all()

    def newest(self, adapter: AdapterKey) -> ResidentVersion | None:
        return self._residency.newest(adapter)

    def get(self, key: VersionKey) -> ResidentVersion | None:
        return self._residency.get(key)

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def unload(self, caller: Caller, adapter_id: str) -> None:
        """Stop following an adapter and unload its versions. A version in use is unloaded when its last lease ends.

        Raises:
            AdapterNotFound: The adapter is neither followed nor resident.
        """
        adapter = AdapterKey(caller.tenant_id, adapter_id)
        if adapter not in self.followers and not self._residency.versions_of(adapter):
            raise AdapterNotFound(adapter_id)
        await self.followers.stop(adapter)
        await self._loading.acquire()
        await self._change(self._unload_adapter(adapter))

    async def close(self) -> None:
        """Stop following all adapters, cancel all fetches, and wait for running changes of the engine's adapters."""
        await self.followers.close()
        await self._fetches.close()
        if self._changes:
            await asyncio.wait(self._changes)

    async def _find(self, caller: Caller, choice: AdapterChoice, facts: CheckpointFacts | None) -> ResidentVersion:
        while True:
            version = await (self._checkpoint(caller, facts) if facts else self._version(caller, choice))
            # The version may have been evicted since its fetch finished.
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
                    return self._residency.get(key) or await self._fetch(caller, key)
                await follower.wait_for_change()

    async def _checkpoint(self, caller: Caller, facts: CheckpointFacts) -> ResidentVersion:
        key = facts.version_key(caller.tenant_id)
        resident = self._residency.get(key)
        return resident or await self._fetches.join(key, lambda: self._source.fetch_checkpoint(caller, facts.path))

    async def _fetch(self, caller: Caller, key: VersionKey) -> ResidentVersion:
        """Fetch a version that was evicted or that the stream skipped."""
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
                # Without capacity the version is skipped here and fetched when a request needs it.
                facts: dict[str, str | int] = {'tenant_id': adapter.tenant_id, 'adapter_id': adapter.name}
                with spans.root_span('new version', **facts, version=announced) as span:
                    spans.annotate(span, size_bytes=update.size_bytes)
                    if await self._try_admit(VersionKey(adapter, announced), update) is not None:
                        follower.measure_publication(update)
                follower.announce(announced)

    async def _try_admit(self, key: VersionKey, weights: AdapterWeights) -> ResidentVersion | None:
        """Load a version, evicting idle ones if necessary; return None if the versions in use leave no capacity."""
        self._check(weights)
        await self._loading.acquire()
        return await self._change(self._load(key, weights))

    async def _admit_requested(self, key: VersionKey, weights: AdapterWeights) -> ResidentVersion | None:
        """Load a version that a request needs, and mark it as used, since the request may be retried."""
        version = await self._try_admit(key, weights)
        if version is not None:
            self._residency.touch(version)
        return version

    async def _change(self, change: Coroutine[Any, Any, ResidentVersion | None]) -> ResidentVersion | None:
        """Complete a change of the engine's adapters, even if the caller is cancelled, and release the lock.

        An incomplete change would leave versions in the engine that are not in `_residency`.
        """

        async def run() -> ResidentVersion | None:
            try:
                return await change
            finally:
                self._loading.release()

        return await asyncio.shield(self._start_change(run()))

    def _start_change(
        self, change: Coroutine[Any, Any, ResidentVersion | None]
    ) -> 'asyncio.Task[ResidentVersion | None]':
        task = asyncio.create_task(change, name='change the adapters')
        self._changes.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[ResidentVersion | None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The error also reaches the caller, unless the caller was cancelled.
            _log.info('change of the adapters failed', error=str(error))

    async def _load(self, key: VersionKey, weights: AdapterWeights) -> ResidentVersion | None:
        if resident := self._residency.get(key):
            return resident
        evicted = self._residency.evict_for(weights.size_bytes)
        if evicted is None:
            return None
        for other in evicted:
            await self._unload(other, keep=key.adapter)
        with spans.span('load adapter', adapter_id=key.adapter.name, version=key.version):
            await self._engine.load_adapter(key, weights)
        version = ResidentVersion(key=key, size_bytes=weights.size_bytes, digest=weights.digest, weights=weights)
        self._residency.add(version)
        self._notify_listeners()
        return version

    async def _unload_adapter(self, adapter: AdapterKey) -> None:
        for key in self._residency.evict_adapter(adapter):
            await self._engine.unload_adapter(key)
        self._notify_listeners()

    async def _unload_released(self, version: ResidentVersion) -> None:
        async with self._loading:
            # Another request may have leased the version; then the end of that lease unloads it.
            if self._residency.evict_released(version):
                await self._engine.unload_adapter(version.key)
                self._notify_listeners()

    def _check(self, weights: AdapterWeights) -> None:
        """Check that this sampler can serve the weights.

        Raises:
            InvalidField: The weights belong to a different base model.
            AdapterMisfit: The weights are not a LoRA adapter, or exceed the memory for adapters.
        """
        if weights.base_model != self._engine.facts.base_model:
            raise InvalidField(
                'adapter',
                f'belongs to base model {weights.base_model!r}; this sampler serves {self._engine.facts.base_model!r}',
            )
        if weights.lora_config is None:
            needs = 'a dedicated sampler: it is a full-parameter run, not a LoRA adapter'
            raise AdapterMisfit(weights.adapter_id, needs)
        if weights.size_bytes > self._residency.max_bytes:
            needs = f'{weights.size_bytes} bytes; the limit for adapters is {self._residency.max_bytes} bytes'
            raise AdapterMisfit(weights.adapter_id, needs)

    async def _unload(self, key: VersionKey, *, keep: AdapterKey) -> None:
        """Unload a version. Stop following its adapter unless the adapter has other versions or is `keep`."""
        await self._engine.unload_adapter(key)
        if key.adapter != keep and not self._residency.versions_of(key.adapter):
            self.followers.stop_idle(key.adapter)

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()
