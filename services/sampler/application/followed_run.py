"""The versions of one full-parameter run, served by the base model's own weights.

A version is staged whole in host memory. Then requests that run finish on the weights they began with while new
ones wait at the door, the engine's weights are replaced, and the door opens. A long request cannot keep the door
shut: after `patience` the old version goes on serving and the new one is tried again later.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import structlog

from services.kit import failpoints
from services.kit.caller import Caller
from services.kit.errors import (
    AdapterNotFound,
    BaseModelNotFound,
    DomainError,
    InvalidField,
    NotSupportedHere,
    VersionNotFound,
)
from services.sampler.application.following import Follower, Followers
from services.sampler.domain.adapter import AdapterChoice, AdapterKey, AdapterWeights, VersionKey
from services.sampler.domain.errors import AdapterMisfit, EngineInUse, VersionNotReady
from services.sampler.domain.residency import ResidentVersion
from services.sampler.ports import SamplerEngine, Synced, WeightSource

_log = structlog.get_logger('followed run')

PATIENCE = timedelta(seconds=30)
"""How long new requests wait at most for running ones, so that a version can be put in place."""
_FIRST_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 1.0
_LEAST_REST_SECONDS = 0.1
_ONE_DAY = timedelta(days=1)


@dataclass(frozen=True)
class _Problem:
    """A version that came and cannot be served."""

    version: int
    error: AdapterMisfit | InvalidField


class FollowedRun:
    """Implements `Versions` for a sampler that belongs to one run.

    Concurrency: for one event loop.
    """

    def __init__(
        self, engine: SamplerEngine, source: WeightSource, run: AdapterKey, *, patience: timedelta = PATIENCE
    ) -> None:
        """Serve `run` in `engine`, with weights from `source`, once started."""
        self._engine = engine
        self._source = source
        self._run = run
        self._patience_seconds = patience.total_seconds()
        self._caller = Caller(tenant_id=run.tenant_id, is_internal=True)
        # Relays may ask for other names, which end at once.
        self.followers = Followers(self._follow, max_followers=16, idle=_ONE_DAY)
        self._current: ResidentVersion | None = None
        """None: the base model as it was loaded, which is no version of the run."""
        self._problem: _Problem | None = None
        """Why the newest version cannot be served."""
        self._is_open = True
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._keeping: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the run from now on, whether it has been published already or not."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name=f'keep {self._run}')

    def check_base(self) -> None:
        """Refuse: nobody is to get changed weights as the base model's.

        Raises:
            BaseModelNotFound: always.
        """
        raise BaseModelNotFound(self._engine.facts.base_model)

    @asynccontextmanager
    async def lease(self, caller: Caller, choice: AdapterChoice) -> AsyncGenerator[ResidentVersion, None]:
        """Hold on to the version there is, if it is what `choice` asks for, within this block.

        Raises:
            AdapterNotFound: the run is another tenant's.
            NotSupportedHere: it names something else than the run.
            VersionNotFound: a version that was replaced.
            VersionNotReady: a version that did not come within the time to wait.
            AdapterMisfit, InvalidField: the version does not fit this base model.
        """
        self._check(caller, choice)
        try:
            async with asyncio.timeout(choice.wait.total_seconds()):
                version = await self._find(choice)
        except TimeoutError as error:
            raise VersionNotReady(choice.adapter_id, choice.wanted_version) from error
        version.use_count += 1
        try:
            yield version
        finally:
            version.use_count -= 1
            self._notify()

    def resident(self, tenant_id: str) -> list[ResidentVersion]:
        """Return what is served, to its own tenant."""
        return self.all_resident() if tenant_id == self._run.tenant_id else []

    def all_resident(self) -> list[ResidentVersion]:
        """Return what is served: at most one version."""
        return [self._current] if self._current else []

    def newest(self, adapter: AdapterKey) -> ResidentVersion | None:
        """Return what is served of an adapter."""
        return self._current if adapter == self._run else None

    def get(self, key: VersionKey) -> ResidentVersion | None:
        """Return a version if it is the one that is served."""
        return self._current if self._current and self._current.key == key else None

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called whenever another version is served."""
        self._listeners.append(listener)

    async def unload(self, caller: Caller, adapter_id: str) -> None:
        """Refuse: the run is what this sampler is there for.

        Raises:
            AdapterNotFound, NotSupportedHere: always one of them.
        """
        self._check(caller, AdapterChoice(adapter_id=adapter_id))
        raise NotSupportedHere('unloading the run that a sampler follows', self._engine.facts.engine)

    async def close(self) -> None:
        """Follow no more; a replacement that has begun is finished."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        await self.followers.close()
        if self._replacing is not None:
            await asyncio.wait([self._replacing])
            _log_failure(self._replacing)

    def _check(self, caller: Caller, choice: AdapterChoice) -> None:
        if caller.tenant_id != self._run.tenant_id:
            raise AdapterNotFound(choice.adapter_id or choice.checkpoint_path)
        if choice.checkpoint_path or choice.adapter_id != self._run.name:
            what = f'another adapter than the run {self._run.name!r}, to which this sampler belongs,'
            raise NotSupportedHere(what, self._engine.facts.engine)

    async def _find(self, choice: AdapterChoice) -> ResidentVersion:
        while True:
            version = self._current.key.version if self._current else 0
            if choice.exact and choice.exact < version:
                raise VersionNotFound(choice.adapter_id, choice.exact)
            if self._is_open and self._current and version >= choice.wanted_version:
                return self._current
            self._refuse_known(choice)
            await self._changed.wait()

    def _refuse_known(self, choice: AdapterChoice) -> None:
        """Refuse what a version that came, and cannot be served, was wanted for; later ones may still do."""
        problem = self._problem
        if problem is None or choice.wanted_version > problem.version:
            return
        if choice.exact and choice.exact < problem.version:
            # The stream has gone past it.
            raise VersionNotFound(choice.adapter_id, choice.exact)
        raise problem.error

    async def _keep(self) -> None:
        """Follow, and follow again after whatever ended it."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                with self.followers.following(self._caller, self._run) as follower:
                    if follower.task is not None:
                        await asyncio.wait([follower.task])
                        _log_failure(follower.task)
                if follower.newest or follower.is_synced:
                    pause = _FIRST_RETRY_SECONDS
            except VersionNotReady as error:
                _log.info('not followed now; tried again', run=str(self._run), error=str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY_SECONDS)

    async def _follow(self, caller: Caller, adapter: AdapterKey, follower: Follower) -> None:
        if adapter != self._run:
            raise AdapterNotFound(adapter.name)
        held = self._current.weights if self._current else None
        async with aclosing(self._source.follow(caller, adapter.name, held)) as updates:
            async for update in updates:
                if isinstance(update, AdapterWeights):
                    await self._take(update)
                served = self._current.key.version if self._current else 0
                follower.announce(served, is_synced=isinstance(update, Synced))

    async def _take(self, weights: AdapterWeights) -> None:
        """Serve a version that is in host memory, or note why it cannot be."""
        self._problem = None
        failpoints.reach('replacement.staged')
        try:
            self._refuse(weights)
            while not await self._try_replace(weights):
                await self._rest()
        except (AdapterMisfit, InvalidField) as error:
            _log.warning('a version cannot be served', run=str(self._run), version=weights.version, error=str(error))
            self._problem = _Problem(weights.version, error)
        self._notify()

    def _refuse(self, weights: AdapterWeights) -> None:
        if weights.base_model != self._engine.facts.base_model:
            raise InvalidField('adapter', f'belongs to base model {weights.base_model!r}')
        if weights.lora_config is not None:
            raise AdapterMisfit(weights.adapter_id, 'a sampler that others share: it is a LoRA adapter')

    async def _try_replace(self, weights: AdapterWeights) -> bool:
        """Put a version in place once nothing runs; return False if that took too long, or the engine cannot now."""
        self._is_open = False
        try:
            async with asyncio.timeout(self._patience_seconds):
                while self._current and self._current.use_count:
                    await self._changed.wait()
        except TimeoutError:
            self._open()
            return False
        except asyncio.CancelledError:
            self._open()
            raise
        # From here on it takes as long as it takes, whatever becomes of the caller: the engine finishes what it has
        # begun, what is known of it must not fall behind, and only one replacement may be under way.
        self._replacing = asyncio.create_task(self._replace(weights), name=f'replace {self._run}')
        try:
            await asyncio.shield(self._replacing)
        except EngineInUse:
            return False
        return True

    async def _replace(self, weights: AdapterWeights) -> None:
        try:
            failpoints.reach('replacement.begun')
            await self._engine.replace_base(weights)
            failpoints.reach('replacement.done')
            self._current = ResidentVersion(
                key=VersionKey(self._run, weights.version),
                size_bytes=weights.size_bytes,
                digest=weights.digest,
                weights=weights,
                is_base=True,
            )
        finally:
            self._open()
        failpoints.reach('replacement.served')
        for listener in self._listeners:
            listener()

    async def _rest(self) -> None:
        """Let requests in for as long as they were kept out, or until none runs.

        Without a rest as long as that, one long request after the other would keep all others out nearly always.
        """
        # An engine that sleeps has nothing running; it is asked again after a moment.
        least = min(_LEAST_REST_SECONDS, self._patience_seconds)
        await asyncio.sleep(least)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_seconds - least):
                while self._current and self._current.use_count:
                    await self._changed.wait()

    def _open(self) -> None:
        self._is_open = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log what ended a task unforeseen; refusals are logged where they are followed."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, DomainError):
        _log.error('a run is not followed, or not replaced', task=task.get_name(), exc_info=error)
