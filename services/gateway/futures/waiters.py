"""Callers that wait in this process for futures to finish. They do not poll the database.

A waiter is resolved when its future, or the next future of its topic, finishes. `Topics` returns the finished futures
of a topic after a cursor. A cursor is a time: the client has received all futures that finished up to that time. Every
gateway on the database, and the next process, can therefore continue from a cursor. A future that finished shortly
before the cursor is returned again unless this process returned it before, so that clients miss no future.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from twinkle_services.gateway.futures.records import FutureRecords
from twinkle_services.gateway.futures.rules import Future, topic_name
from twinkle_services.kit.caller import Caller

Waiter = asyncio.Future[Future | None]
"""Resolves to the finished future, or to None if the caller has to read the store again."""
_OVERLAP = timedelta(seconds=2)
"""Time after which no more futures with an earlier finish time become visible. Until then, such futures may appear,
because the gateways' clocks differ and transactions may overtake each other."""
_PAGE_SIZE = 1000
"""Maximum number of futures per read, and per response in addition to the futures of the overlap."""
_MAX_REMEMBERED = 4096
_START = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MAX_CURSOR = (datetime(9999, 1, 1, tzinfo=UTC) - _START) // _MICROSECOND
"""Largest cursor that can be converted to a time."""


class Waiters:
    """Waiters by the id of a future or the name of a topic.

    Concurrency: use it from one event loop.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[Waiter]] = {}
        self.is_closed = False
        """Whether `close` was called; new waiters are then resolved to None immediately."""

    @contextmanager
    def waiting(self, name: str) -> Iterator[Waiter]:
        """Register a waiter, for the duration of the block, for a future's id or for a topic's `topic_name`."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, set()).add(waiter)
        if self.is_closed:
            waiter.set_result(None)
        try:
            yield waiter
        finally:
            others = self._waiting[name]
            others.discard(waiter)
            if not others:
                del self._waiting[name]

    def notify(self, future: Future) -> None:
        """Resolve the waiters of a finished future and of its topic."""
        for name in (future.future_id, topic_name(future.tenant_id, future.topic)):
            for waiter in self._waiting.get(name, ()):
                if not waiter.done():
                    waiter.set_result(future)

    def is_awaited(self, name: str) -> bool:
        """Return whether there is a waiter for a future's id or a topic's name."""
        return name in self._waiting

    def close(self) -> None:
        self.is_closed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Wake all waiters, so that they read the store again."""
        for waiter in [item for waiting in self._waiting.values() for item in waiting]:
            if not waiter.done():
                waiter.set_result(None)


@dataclass(frozen=True)
class _Delivery:
    """Last response of this process for a topic."""

    cursor: int = 0
    """Cursor of the last response with futures."""
    known: Mapping[str, datetime] = field(default_factory=dict[str, datetime])
    """Finish times, by id, of the futures that the client has received and that the next read lists again."""


class Topics:
    """Returns the finished futures of a topic, each at least once."""

    def __init__(self, records: FutureRecords, waiters: Waiters, *, caller: Callable[[], Caller]) -> None:
        self._store = records.store
        self._waiters = waiters
        self._caller = caller
        self._deliveries: OrderedDict[tuple[str, str], _Delivery] = OrderedDict()

    async def finished_after(self, topic: str, *, cursor: int, seconds: float) -> tuple[Sequence[Future], int]:
        """Return the caller's futures of a topic that finished after a cursor, and the next cursor.

        The first cursor is 0. Wait up to `seconds` for a finished future. One response has at most one page of futures
        in addition to the futures of the overlap.
        """
        tenant_id = self._caller().tenant_id
        last = self._deliveries.get((tenant_id, topic))
        # A different cursor was issued by another process, or before a lost response: the overlap is returned again.
        known = (last if last is not None and last.cursor == cursor else _Delivery()).known
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + seconds
        while True:
            with self._waiters.waiting(topic_name(tenant_id, topic)) as waiter:
                finished = await self._read(tenant_id, topic, cursor, known)
                remaining = give_up_at - loop.time()
                if finished or remaining <= 0:
                    break
                await asyncio.wait({waiter}, timeout=remaining)
                if self._waiters.is_closed:
                    break
        return finished, self._record(tenant_id, topic, cursor, {**known, **_times(finished)}) if finished else cursor

    async def _read(self, tenant_id: str, topic: str, cursor: int, known: Mapping[str, datetime]) -> list[Future]:
        """Return futures that are not in `known`: all that finished shortly before the cursor, and some later ones."""
        reached = _time_of(cursor)
        since = reached - _OVERLAP if cursor else None
        found: dict[str, Future] = {}
        while True:
            finished = await self._store.list_by_topic(tenant_id, topic, since=since, limit=_PAGE_SIZE)
            found |= {future.future_id: future for future in finished if future.future_id not in known}
            last = finished[-1].finish_time if finished else None
            if len(finished) < _PAGE_SIZE or last is None or last == since or (found and last > reached):
                return list(found.values())
            since = last

    def _record(self, tenant_id: str, topic: str, cursor: int, known: Mapping[str, datetime]) -> int:
        """Remember a response, and return the cursor after it, which is larger than the previous one."""
        after = max(cursor + 1, *((time - _START) // _MICROSECOND for time in known.values()))
        oldest = _time_of(after) - _OVERLAP
        self._deliveries[tenant_id, topic] = _Delivery(after, {key: at for key, at in known.items() if at >= oldest})
        self._deliveries.move_to_end((tenant_id, topic))
        if len(self._deliveries) > _MAX_REMEMBERED:
            self._deliveries.popitem(last=False)
        return after


def _times(futures: Sequence[Future]) -> dict[str, datetime]:
    return {future.future_id: future.finish_time for future in futures if future.finish_time is not None}


def _time_of(cursor: int) -> datetime:
    """Return the time up to which a client has received every finished future. Cursors are untrusted input."""
    return _START + min(cursor, _MAX_CURSOR) * _MICROSECOND
