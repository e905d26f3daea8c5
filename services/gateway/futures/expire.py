"""The verb that forgets futures that finished long ago, and files that belong to none."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Never

import structlog

from services.gateway.futures.ports import FutureStore, PayloadStore
from services.gateway.futures.rules import future_id_of_name
from services.kit.clock import Clock
from services.kit.errors import DomainError

_AT_ONCE = 200
_STRAY_AGE = timedelta(hours=1)
"""After which a file that belongs to no future was left by a process that was killed before it wrote the row."""

_log = structlog.get_logger('futures')


class ExpireFutures:
    """Takes results away some time after they were ready, and the last trace of a future some time later."""

    def __init__(
        self,
        store: FutureStore,
        payloads: PayloadStore,
        *,
        results_for: timedelta,
        records_for: timedelta,
        clock: Clock,
    ) -> None:
        """Sweep both stores.

        Args:
            store: futures.
            payloads: their requests and results.
            results_for: how long results are kept after the future finished.
            records_for: how long it is known after it finished that there was a future; at least `results_for`.
            clock: tells the time.
        """
        self._store = store
        self._payloads = payloads
        self._results_for = results_for
        self._records_for = records_for
        self._clock = clock

    async def __call__(self) -> int:
        """Return how many results were taken away. Interrupted at any point, the next sweep completes it."""
        now, count = self._clock.now(), 0
        while futures := await self._store.list_finished(finished_before=now - self._results_for, limit=_AT_ONCE):
            for future in futures:
                await self._payloads.delete(future.payload_name)
                await self._payloads.delete(future.result_name)
            await self._store.expire([future.future_id for future in futures])
            count += len(futures)
        await self._store.drop_expired(finished_before=now - self._records_for)
        await self._drop_strays()
        return count

    async def keep_on(self, *, interval: timedelta, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Never:
        """Sweep every `interval` until cancelled; a sweep that fails is made up for by the next."""
        while True:
            await pause(interval.total_seconds())
            try:
                if count := await self():
                    _log.info('futures expired', count=count)
            except DomainError as error:
                _log.warning('sweep failed', reason=error.reason)

    async def _drop_strays(self) -> None:
        names = await self._payloads.list_old(kept_before=self._clock.now() - _STRAY_AGE)
        known = await self._store.find_known({future_id_of_name(name) for name in names})
        for name in names:
            if future_id_of_name(name) not in known:
                await self._payloads.delete(name)
