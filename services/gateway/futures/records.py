"""Futures as they are stored: rows in the database, requests and results as payloads, and their expiry."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Never

import structlog

from twinkle_services.gateway.errors import FutureExpired, PayloadLost, RequestCrashed
from twinkle_services.gateway.futures.ports import FutureStore, PayloadStore
from twinkle_services.gateway.futures.rules import Future, FutureState, FutureTaken, future_id_of_name
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.retry import Retry

MAX_CRASHES = 3
"""A resumed future fails once the process has crashed this many times while it ran the future."""
SUSPECTED_CRASHES = 2
"""Number of these crashes after which a future is suspected. Suspected futures run one at a time, so that only the
future that causes the crashes fails."""
_ALONE_WAIT_SECONDS = 30.0
"""Maximum wait of a suspected future for another suspected future."""
_EXPIRED_AT_ONCE = 200
_ORPHAN_AGE = timedelta(hours=1)
"""Age after which a payload without a row is deleted: its process was killed before it wrote the row."""

_log = structlog.get_logger('futures')

Outcome = bytes | DomainError


class FutureRecords:
    """Reads and writes rows and payloads in an order that keeps them consistent even if the process is killed.

    Calls that run or settle a future are retried; reads for clients are not.
    """

    def __init__(self, store: FutureStore, payloads: PayloadStore, *, retry: Retry, clock: Clock) -> None:
        self.store = store
        self.payloads = payloads
        self.retry = retry
        self.clock = clock
        self.attempts = Attempts(payloads, retry)
        self.on_settled: Callable[[Future, Future], None] = lambda future, stored: None
        """Called when the store has settled a future, with the future to store and the stored one."""

    async def read_request(self, future: Future) -> bytes:
        """Return the request of a future that is about to run.

        Raises:
            PayloadLost: the request is missing or damaged.
        """
        payload = await self.retry.call(partial(self.payloads.get, future.payload_name))
        if payload is None:
            raise PayloadLost(future.future_id)
        return payload

    async def read(self, future: Future, name: str) -> bytes:
        """Return a payload of a future.

        Raises:
            FutureExpired: the future is expired, or the payload is the deleted request of a finished future.
            PayloadLost: the payload is missing or damaged.
        """
        data = await self.payloads.get(name)
        if data is not None:
            return data
        stored = await self.store.get(future.tenant_id, future.future_id)
        is_expired = stored is None or stored.state is FutureState.EXPIRED
        if is_expired or (name == future.payload_name and stored is not None and stored.is_finished):
            raise FutureExpired(future.future_id)
        raise PayloadLost(future.future_id)

    async def settle(self, future: Future, outcome: Outcome) -> Future:
        """Store an outcome and return the stored future. The result is stored before the row with the state DONE.

        Raises:
            FutureTaken: another gateway owns the future.
        """
        if isinstance(outcome, bytes):
            await self.retry.call(partial(self.payloads.put, future.result_name, outcome))
            reach('future.result')
        stored = await self.retry.call(partial(self._settle_row, future, outcome))
        reach('future.settled')
        if stored.owner != future.owner:
            raise FutureTaken
        return stored

    async def delete_request(self, future: Future) -> None:
        """Delete the request and the count of attempts of a finished future."""
        await self.attempts.end(future)
        await self.retry.call(partial(self.payloads.delete, future.payload_name))

    async def _settle_row(self, future: Future, outcome: Outcome) -> Future:
        # Each attempt has a new time: followers of a topic look back only a few seconds for missed futures.
        moment = self.clock.now()
        finished = future.done(moment=moment) if isinstance(outcome, bytes) else future.failed(outcome, moment=moment)
        stored = await self.store.settle(finished)
        self.on_settled(finished, stored)
        return stored


class Attempts:
    """Counts durably the crashes of the process while it ran a resumed future, because the future may be the cause."""

    def __init__(self, payloads: PayloadStore, retry: Retry) -> None:
        self._payloads = payloads
        self._retry = retry
        self._counted: set[str] = set()
        """Ids of the futures that this process counted."""
        self._alone = asyncio.Lock()
        self._alone_id = ''
        """Id of the suspected future that runs alone, until its outcome is stored; empty without one."""

    async def begin(self, future: Future) -> None:
        """Count an attempt. `end` deletes the stored count, which therefore remains only if the process crashes.

        Raises:
            RequestCrashed: the process crashed during `MAX_CRASHES` attempts.
        """
        if future.future_id in self._counted:
            return
        crashes = int(await self._retry.call(partial(self._payloads.get, future.attempts_name)) or b'0')
        self._counted.add(future.future_id)
        if crashes >= MAX_CRASHES:
            raise RequestCrashed(crashes)
        if crashes >= SUSPECTED_CRASHES:
            await self._wait_for_others(future)
        await self._retry.call(partial(self._payloads.put, future.attempts_name, b'%d' % (crashes + 1)))

    async def end(self, future: Future) -> None:
        """Delete the count of a future whose outcome is stored, or whose process stops without a crash."""
        if future.future_id in self._counted:
            await self._retry.call(partial(self._payloads.delete, future.attempts_name))
            self._counted.discard(future.future_id)
        if future.future_id == self._alone_id:
            self._alone_id = ''
            self._alone.release()

    async def _wait_for_others(self, future: Future) -> None:
        """Wait until no other suspected future runs, at most for `_ALONE_WAIT_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ALONE_WAIT_SECONDS):
                await self._alone.acquire()
                self._alone_id = future.future_id


@dataclass(frozen=True, kw_only=True)
class Expiry:
    """Deletes the results of finished futures and, later, their records."""

    records: FutureRecords
    results_for: timedelta
    """Time for which results are stored after the future finished."""
    records_for: timedelta
    """Time for which the record of a future is stored after it finished; at least `results_for`."""

    async def sweep(self) -> int:
        """Delete expired results and records, and payloads without a record; return the number of expired futures.

        The next sweep completes an interrupted one.
        """
        store, payloads, now, count = self.records.store, self.records.payloads, self.records.clock.now(), 0
        while futures := await store.list_finished(finished_before=now - self.results_for, limit=_EXPIRED_AT_ONCE):
            for future in futures:
                await payloads.delete(future.payload_name)
                await payloads.delete(future.result_name)
            await store.expire([future.future_id for future in futures])
            count += len(futures)
        await store.drop_expired(finished_before=now - self.records_for)
        await self._delete_orphans()
        return count

    async def run(self, *, interval: timedelta, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Never:
        """Sweep every `interval` until cancelled; the next sweep completes a failed one."""
        while True:
            await pause(interval.total_seconds())
            try:
                if count := await self.sweep():
                    _log.info('futures expired', count=count)
            except DomainError as error:
                _log.warning('sweep failed', reason=error.reason)

    async def _delete_orphans(self) -> None:
        names = await self.records.payloads.list_old(stored_before=self.records.clock.now() - _ORPHAN_AGE)
        known = await self.records.store.find_known({future_id_of_name(name) for name in names})
        for name in names:
            if future_id_of_name(name) not in known:
                await self.records.payloads.delete(name)
