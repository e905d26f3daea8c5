"""Operations on the current caller's futures, and the handling of notifications from other gateways."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

from twinkle_services.gateway.errors import FutureExpired, FutureNotFound
from twinkle_services.gateway.futures.ports import Executor
from twinkle_services.gateway.futures.rules import (
    DELETE_KIND,
    Future,
    FutureRequest,
    FutureState,
    Notification,
    NotificationKind,
)
from twinkle_services.gateway.futures.runner import Runner
from twinkle_services.gateway.futures.sql_peers import SqlPeers
from twinkle_services.gateway.futures.waiters import Topics
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError, Draining
from twinkle_services.kit.failpoints import reach

_LARGE_BYTES = 1 << 18
"""Size above which a payload's digest is computed in a thread, so that the event loop is not blocked."""
_RESULT_SECONDS = 60.0
"""Maximum wait of `wait_for_result`."""


class Futures:
    """Accepts requests, and returns their outcomes.

    `peers` are the other gateways on the database; None if the database cannot be shared. `close` refuses requests that
    are not stored within `grace`.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        peers: SqlPeers | None,
        caller: Callable[[], Caller],
        grace: timedelta = timedelta(seconds=1),
    ) -> None:
        self._runner = runner
        self._records = runner.records
        self._capacity = runner.capacity
        self._waiters = runner.waiters
        self._peers = peers
        self._caller = caller
        self._grace_seconds = grace.total_seconds()
        self._owner = ''
        self._remote: dict[str, Future] = {}
        """Futures accepted here that other gateways own; this gateway counts them until they are finished."""
        self._accepting: set[asyncio.Task[Future]] = set()
        self._is_closed = False
        self.topics = Topics(runner.records, runner.waiters, caller=caller)
        """Finished futures by topic."""

    @property
    def is_disowned(self) -> asyncio.Event:
        """See `Runner.is_disowned`."""
        return self._runner.is_disowned

    def add_executor(self, kind: str, executor: Executor, *, on_settled: Callable[[Future, Future], None]) -> None:
        """Add an executor, and set `FutureRecords.on_settled` for all kinds. Call it before the first future runs."""
        self._runner.executors[kind] = executor
        self._records.on_settled = on_settled

    def is_rate_limited(self, tenant_id: str) -> bool:
        """Return whether a tenant's lanes wait because the tenant is over its token rate."""
        return self._runner.limits.is_rate_limited(tenant_id)

    async def restart_as(self, owner: str) -> None:
        """Run only the futures of `owner` from now on; call `resume` to load them."""
        previous, self._runner, self._owner = self._runner, self._runner.successor(), owner
        await previous.close()

    async def submit(self, request: FutureRequest) -> Future:
        """Accept a request durably; a repeated request with the same key returns the same future.

        Raises:
            RequestIdReused: the key was used for a different request.
            QueueFull: the tenant, or all tenants together, have too many unfinished futures or request bytes.
            QuotaExceeded: the future samples, and its tenant has too many samples in flight or is over its token rate.
            Draining: this gateway is shutting down.
            ServiceUnreachable, DiskFull: the request could not be stored.
        """
        if self._is_closed:
            raise Draining()
        future = await self._future_of(request)
        known = self._runner.find(future.future_id)
        if known is None:
            # The task is shielded: a caller that disconnects must not leave a row that no gateway runs.
            task = asyncio.create_task(self._accept(future, request.payload))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)
            try:
                known = await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise Draining() from None
                raise
        known.check_repeat(future.fingerprint)
        return known

    async def wait(self, future_id: str, *, seconds: float) -> Future:
        """Wait until the caller's future is finished, `seconds` have passed, or this gateway stops; return the future.

        Raises:
            FutureNotFound: the caller has no such future.
            FutureExpired: the outcome of the future is no longer stored.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + seconds
        while True:
            with self._waiters.waiting(future_id) as waiter:
                future = self._find_running(future_id) or await self._find(future_id)
                remaining = give_up_at - loop.time()
                if future.is_finished or remaining <= 0 or self._is_closed:
                    return future
                await asyncio.wait({waiter}, timeout=remaining)
                if waiter.done() and (finished := waiter.result()) is not None:
                    return finished

    async def wait_for_result(self, future_id: str) -> bytes | None:
        """Wait up to a minute for the caller's future and return its result; None if it is not finished.

        Raises:
            FutureNotFound, FutureExpired: see `wait`.
            DomainError: see `result`.
        """
        future = await self.wait(future_id, seconds=_RESULT_SECONDS)
        return await self.result(future) if future.is_finished else None

    async def payload(self, future: Future) -> bytes:
        """Return the request of a future. The request is stored until the future is finished.

        Raises:
            FutureExpired, PayloadLost: the request is deleted, or is missing or damaged. Facts that are needed later
                belong in the future's note.
        """
        return await self._records.read(future, future.payload_name)

    async def result(self, future: Future) -> bytes:
        """Return the result of a finished future.

        Raises:
            DomainError: the error that the future failed with.
            FutureExpired, PayloadLost: the result is deleted, or is missing or damaged.
        """
        if future.error is not None:
            raise future.error
        return await self._records.read(future, future.result_name)

    async def result_bytes(self, future: Future) -> int:
        """Return the size of a future's result; 0 without a result."""
        return await self._records.payloads.size(future.result_name)

    async def cancel(self, future_id: str) -> None:
        """Stop a future if possible. A stopped future fails as cancelled, and its lane continues.

        Raises:
            FutureNotFound, FutureExpired: see `wait`.
            DomainError: the model service cannot be reached, or has no such operation.
        """
        await self._stop(await self._find(future_id))

    async def drop_session(self, session_id: str) -> None:
        """Stop the unfinished futures of a caller's session, except adapter deletions; then raise the first failure."""
        failures: list[DomainError] = []
        for future in await self._records.store.list_of_session(self._caller().tenant_id, session_id):
            if future.kind != DELETE_KIND:
                try:
                    await self._stop(future)
                except DomainError as error:
                    # If one model service cannot be reached, the futures of the others are stopped nevertheless.
                    failures.append(error)
        if failures:
            raise failures[0]

    async def resume(self) -> int:
        """Run all waiting futures of this gateway that are not loaded yet; return the number of waiting futures."""
        records = self._records
        with self._runner.recording_finished() as finished_ids:
            waiting = await records.retry.call(partial(records.store.list_waiting, self._owner))
            waiting = [future for future in waiting if future.future_id not in finished_ids]
        for future in waiting:
            await self._resume_one(future)
        self._runner.check_gaps()
        return len(waiting)

    async def handle(self, notification: Notification) -> None:
        """Handle a notification; the sender may be this gateway."""
        match notification.kind:
            case NotificationKind.ACCEPTED if notification.owner == self._owner:
                await self._run_accepted(notification)
            case NotificationKind.CANCELLED if notification.owner == self._owner:
                await self._runner.cancel(notification.future_id)
            case NotificationKind.FINISHED:
                await self._handle_finished(notification)
            case NotificationKind.MISSED:
                await self._handle_missed()
            case _:
                pass

    def begin_stop(self) -> None:
        """Accept no more requests, and end all waits."""
        self._is_closed = True
        self._waiters.close()

    async def close(self) -> None:
        """Stop, and leave unfinished futures to the next process."""
        self.begin_stop()
        # The next process runs the futures that are stored by now. Requests that are not stored within the grace time
        # are refused, because an unreachable database could delay them indefinitely.
        if self._accepting:
            _, unfinished = await asyncio.wait(self._accepting, timeout=self._grace_seconds)
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished, timeout=self._grace_seconds)
        await self._runner.close()

    async def _stop(self, future: Future) -> None:
        if self._peers is None or future.is_finished or future.owner == self._owner:
            await self._runner.cancel(future.future_id)
            return
        kind = NotificationKind.CANCELLED
        await self._peers.notify(
            Notification(kind=kind, owner=future.owner, tenant_id=future.tenant_id, future_id=future.future_id)
        )

    async def _future_of(self, request: FutureRequest) -> Future:
        moment = self._records.clock.now()
        create = partial(Future.accepted, request, tenant_id=self._caller().tenant_id, moment=moment)
        future = await asyncio.to_thread(create) if len(request.payload) > _LARGE_BYTES else create()
        return replace(future, owner=self._owner)

    async def _accept(self, future: Future, payload: bytes) -> Future:
        records = self._records
        self._capacity.enter(future, len(payload))
        try:
            await records.payloads.check_free_space(len(payload))
            await records.payloads.put(future.payload_name, payload)
            reach('future.payload')
            with self._runner.recording_finished() as finished_ids:
                stored = await records.store.add_if_absent(future)
            reach('future.row')
            if stored.future_id not in finished_ids:
                self._add_remote(stored, len(payload))
            if stored is future and stored.owner == self._owner:
                await self._runner.add(future)
                return future
        finally:
            # If the future runs here, the runner counts it too.
            self._capacity.leave(future)
        # Another gateway owns the lane, or the future was accepted before, possibly by a concurrent call.
        if not stored.is_finished and stored.future_id not in finished_ids:
            await self._resume_one(stored)
        if stored.is_finished or stored.fingerprint != future.fingerprint:
            await records.payloads.delete(future.payload_name)
        return stored

    async def _resume_one(self, future: Future, *, is_new: bool = False) -> None:
        """Run a waiting future, unless it is loaded or has another owner; `is_new` means that it has never run."""
        if self._runner.find(future.future_id) is not None:
            return
        records = self._records
        with self._runner.recording_finished() as finished_ids:
            size_bytes = await records.retry.call(partial(records.payloads.size, future.payload_name))
        if future.owner != self._owner or future.future_id in finished_ids:
            return
        self._capacity.enter_accepted(future, size_bytes)
        try:
            await self._runner.add(future, is_resumed=not is_new)
        finally:
            self._capacity.leave(future)

    def _add_remote(self, future: Future, size_bytes: int) -> None:
        if future.is_finished or future.owner == self._owner or future.future_id in self._remote:
            return
        self._remote[future.future_id] = future
        self._capacity.enter_accepted(future, size_bytes)

    def _remove_remote(self, future_id: str) -> None:
        if (future := self._remote.pop(future_id, None)) is not None:
            self._capacity.leave(future)

    async def _run_accepted(self, notification: Notification) -> None:
        """Run a future that another gateway accepted for this one."""
        with self._runner.recording_finished() as finished_ids:
            future = await self._records.store.get(notification.tenant_id, notification.future_id)
            if future is None or future.is_finished or future.future_id in finished_ids:
                return
        await self._resume_one(future, is_new=True)

    async def _handle_finished(self, notification: Notification) -> None:
        """Notify the waiters of a future that this or another gateway has finished."""
        future_id = notification.future_id
        self._runner.record_finished(future_id)
        self._remove_remote(future_id)
        if not (self._waiters.is_awaited(future_id) or self._waiters.is_awaited(notification.topic)):
            return
        future = await self._records.store.get(notification.tenant_id, future_id)
        if future is not None and future.is_finished:
            self._waiters.notify(future)

    async def _handle_missed(self) -> None:
        """Read the store for all events whose notifications may have been lost."""
        await self.resume()
        for future in list(self._remote.values()):
            stored = await self._records.store.get(future.tenant_id, future.future_id)
            if stored is None or stored.is_finished or stored.owner == self._owner:
                self._remove_remote(future.future_id)
        self._waiters.wake_all()

    def _find_running(self, future_id: str) -> Future | None:
        """Return the caller's future if it waits or runs here, else None. Needs no database query."""
        future = self._runner.find(future_id)
        return future if future is not None and future.tenant_id == self._caller().tenant_id else None

    async def _find(self, future_id: str) -> Future:
        future = await self._records.store.get(self._caller().tenant_id, future_id)
        if future is None:
            raise FutureNotFound(future_id)
        if future.state is FutureState.EXPIRED:
            raise FutureExpired(future_id)
        return future
