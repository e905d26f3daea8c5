"""The versions of one full-parameter run, served as the engine's base weights.

A new version is first loaded completely into host memory. Then new requests wait while running requests finish with
the old weights, the engine's weights are replaced, and requests are admitted again. If running requests take longer
than `patience`, requests continue with the old version, and the replacement is retried later.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import structlog

from twinkle_services.kit import failpoints
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import (
    AdapterNotFound,
    BaseModelNotFound,
    DomainError,
    InvalidField,
    NotSupportedHere,
    VersionNotFound,
)
from twinkle_services.sampler.application.followers import Follower, Followers
from twinkle_services.sampler.domain.adapter import AdapterChoice, AdapterKey, AdapterWeights, VersionKey
from twinkle_services.sampler.domain.errors import AdapterMisfit, EngineInUse, VersionNotReady
from twinkle_services.sampler.domain.residency import ResidentVersion
from twinkle_services.sampler.ports import SamplerEngine, Synced, WeightSource

_log = structlog.get_logger('followed run')

PATIENCE = timedelta(seconds=30)
"""Maximum time that new requests wait for running requests before a replacement."""
_FIRST_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 1.0
_MIN_PAUSE_SECONDS = 0.1
_ONE_DAY = timedelta(days=1)


@dataclass(frozen=True)
class _Problem:
    """A received version that cannot be served."""

    version: int
    error: AdapterMisfit | InvalidField


class FullParameterRun:
    """Implements `Versions` for a sampler that serves one full-parameter run.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self, engine: SamplerEngine, source: WeightSource, run: AdapterKey, *, patience: timedelta = PATIENCE
    ) -> None:
        """Create the versions of a run; `start` begins to follow it.

        Args:
            engine: Engine whose base weights are replaced.
            source: Source of the run's versions.
            run: The run to serve.
            patience: Maximum time that new requests wait for running requests before a replacement.
        """
        self._engine = engine
        self._source = source
        self._run = run
        self._patience_seconds = patience.total_seconds()
        self._caller = Caller(tenant_id=run.tenant_id, is_internal=True)
        # Samplers that use this one as their relay may request other adapters; those streams fail immediately.
        self.followers = Followers(self._follow, max_followers=16, idle=_ONE_DAY)
        self._current: ResidentVersion | None = None
        """Version in the engine; None for the original base model, which is not a version of the run."""
        self._problem: _Problem | None = None
        """Reason why the newest version cannot be served."""
        self._is_admitting = True
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._following_task: asyncio.Task[None] | None = None
        self._replacement: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start following the run, whether or not it has been published yet."""
        if self._following_task is None:
            self._following_task = asyncio.create_task(self._keep_following(), name=f'keep {self._run}')

    def check_base(self) -> None:
        """Raise an error: the engine's base weights belong to the run, not to the base model.

        Raises:
            BaseModelNotFound: Always.
        """
        raise BaseModelNotFound(self._engine.facts.base_model)

    @asynccontextmanager
    async def lease(self, caller: Caller, choice: AdapterChoice) -> AsyncGenerator[ResidentVersion, None]:
        """Wait until the served version satisfies `choice`, and prevent its replacement within this block.

        Raises:
            AdapterNotFound: The run belongs to another tenant.
            NotSupportedHere: The request names another adapter or a checkpoint.
            VersionNotFound: The version has already been replaced or skipped.
            VersionNotReady: The version did not arrive in time.
            AdapterMisfit, InvalidField: The version does not fit this base model.
        """
        self._check(caller, choice)
        try:
            async with asyncio.timeout(choice.wait.total_seconds()):
                version = await self._find(choice)
        except TimeoutError as error:
            raise VersionNotReady(choice.adapter_id, choice.lowest_version) from error
        version.use_count += 1
        try:
            yield version
        finally:
            version.use_count -= 1
            self._notify()

    def resident(self, tenant_id: str) -> list[ResidentVersion]:
        return self.all_resident() if tenant_id == self._run.tenant_id else []

    def all_resident(self) -> list[ResidentVersion]:
        return [self._current] if self._current else []

    def newest(self, adapter: AdapterKey) -> ResidentVersion | None:
        return self._current if adapter == self._run else None

    def get(self, key: VersionKey) -> ResidentVersion | None:
        return self._current if self._current and self._current.key == key else None

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def unload(self, caller: Caller, adapter_id: str) -> None:
        """Raise an error: this sampler always serves the run.

        Raises:
            AdapterNotFound: The run belongs to another tenant.
            NotSupportedHere: In all other cases.
        """
        self._check(caller, AdapterChoice(adapter_id=adapter_id))
        raise NotSupportedHere('unloading the run that a sampler follows', self._engine.facts.engine)

    async def close(self) -> None:
        """Stop following the run, and wait for a running replacement."""
        if self._following_task is not None:
            self._following_task.cancel()
            await asyncio.wait([self._following_task])
        await self.followers.close()
        if self._replacement is not None:
            await asyncio.wait([self._replacement])
            _log_failure(self._replacement)

    def _check(self, caller: Caller, choice: AdapterChoice) -> None:
        if caller.tenant_id != self._run.tenant_id:
            raise AdapterNotFound(choice.adapter_id or choice.checkpoint_path)
        if choice.checkpoint_path or choice.adapter_id != self._run.name:
            feature = f'an adapter other than {self._run.name!r}, the only run that this sampler serves,'
            raise NotSupportedHere(feature, self._engine.facts.engine)

    async def _find(self, choice: AdapterChoice) -> ResidentVersion:
        while True:
            version = self._current.key.version if self._current else 0
            if choice.exact and choice.exact < version:
                raise VersionNotFound(choice.adapter_id, choice.exact)
            if self._is_admitting and self._current and version >= choice.lowest_version:
                return self._current
            self._check_problem(choice)
            await self._changed.wait()

    def _check_problem(self, choice: AdapterChoice) -> None:
        """Raise an error if the newest version is unusable and the request needs that version or an earlier one."""
        problem = self._problem
        if problem is None or choice.lowest_version > problem.version:
            return
        if choice.exact and choice.exact < problem.version:
            # The stream has already skipped the requested version.
            raise VersionNotFound(choice.adapter_id, choice.exact)
        raise problem.error

    async def _keep_following(self) -> None:
        """Follow the run, and reopen the stream whenever it closes."""
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            try:
                with self.followers.following(self._caller, self._run) as follower:
                    await follower.wait_for_end()
                if follower.newest or follower.is_synced:
                    retry_seconds = _FIRST_RETRY_SECONDS
            except VersionNotReady as error:
                _log.info('cannot follow run; retrying', run=str(self._run), error=str(error))
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, _MAX_RETRY_SECONDS)

    async def _follow(self, caller: Caller, adapter: AdapterKey, follower: Follower) -> None:
        if adapter != self._run:
            raise AdapterNotFound(adapter.name)
        held = self._current.weights if self._current else None
        async with aclosing(self._source.follow(caller, adapter.name, held)) as updates:
            async for update in updates:
                if isinstance(update, AdapterWeights):
                    await self._serve(update)
                served = self._current.key.version if self._current else 0
                if isinstance(update, AdapterWeights) and update.version == served:
                    follower.measure_publication(update)
                follower.announce(served, is_synced=isinstance(update, Synced))

    async def _serve(self, weights: AdapterWeights) -> None:
        """Replace the engine's weights with a received version, or record the reason why this is impossible."""
        self._problem = None
        failpoints.reach('replacement.staged')
        try:
            self._check_weights(weights)
            while not await self._try_replace(weights):
                await self._pause_before_retry()
        except (AdapterMisfit, InvalidField) as error:
            _log.warning('version cannot be served', run=str(self._run), version=weights.version, error=str(error))
            self._problem = _Problem(weights.version, error)
        self._notify()

    def _check_weights(self, weights: AdapterWeights) -> None:
        if weights.base_model != self._engine.facts.base_model:
            raise InvalidField(
                'adapter',
                f'belongs to base model {weights.base_model!r}; this sampler serves {self._engine.facts.base_model!r}',
            )
        if weights.lora_config is not None:
            raise AdapterMisfit(weights.adapter_id, 'a sampler that serves LoRA adapters')

    async def _try_replace(self, weights: AdapterWeights) -> bool:
        """Wait until no request runs and replace the weights; return False on a timeout or if the engine is busy."""
        self._is_admitting = False
        try:
            async with asyncio.timeout(self._patience_seconds):
                while self._current and self._current.use_count:
                    await self._changed.wait()
        except TimeoutError:
            self._admit()
            return False
        except asyncio.CancelledError:
            self._admit()
            raise
        # The replacement completes even if this call is cancelled. The engine cannot interrupt it, the state of this
        # object must match the engine's state, and only one replacement may run at a time.
        self._replacement = asyncio.create_task(self._replace(weights), name=f'replace {self._run}')
        try:
            await asyncio.shield(self._replacement)
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
            self._admit()
        failpoints.reach('replacement.served')
        for listener in self._listeners:
            listener()

    async def _pause_before_retry(self) -> None:
        """Wait before the next attempt, for at most `patience` or until no request is running.

        With a shorter pause, new requests would almost always be waiting for a long-running request.
        """
        # A sleeping engine runs no request; the minimum pause limits the rate of attempts.
        minimum = min(_MIN_PAUSE_SECONDS, self._patience_seconds)
        await asyncio.sleep(minimum)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_seconds - minimum):
                while self._current and self._current.use_count:
                    await self._changed.wait()

    def _admit(self) -> None:
        self._is_admitting = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log an unexpected error of a task."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, DomainError):
        _log.error('replacement of the weights failed', task=task.get_name(), exc_info=error)
