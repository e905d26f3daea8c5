"""The verb that tells the ends of many futures at once: those of a topic, after a cursor.

A cursor is a moment: whoever has it was told all that ended until then. So every gateway on the database, and the next
process, goes on from it. What ended shortly before it is told twice, where this process did not tell it; none is lost.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from services.gateway.futures.news import topic_name
from services.gateway.futures.rules import Future
from services.gateway.futures.world import World

_OVERLAP = timedelta(seconds=2)
"""An end that is older than the newest one known by so much may still come: gateways' clocks differ, and one
transaction may overtake another."""
_AT_ONCE = 1000
"""Ends read at a time, and told in one answer, beside those of the overlap; the rest comes after the next cursor."""
_REMEMBERED = 4096
_START = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MOST = (datetime(9999, 1, 1, tzinfo=UTC) - _START) // _MICROSECOND
"""Largest cursor that is a moment."""


@dataclass(frozen=True)
class _Told:
    """What this process told of a topic lately."""

    cursor: int = 0
    """Of the last answer that told something."""
    known: Mapping[str, datetime] = field(default_factory=dict[str, datetime])
    """Ends that whoever has this cursor was told here, and that are listed again for it."""


class FollowTopic:
    """Tells ends, some of them twice, all of them at least once."""

    def __init__(self, world: World) -> None:
        """Read the store once for each piece of news, and only then."""
        self._world = world
        self._told: OrderedDict[tuple[str, str], _Told] = OrderedDict()

    async def __call__(self, topic: str, *, cursor: int, seconds: float) -> tuple[Sequence[Future], int]:
        """Return the caller's futures of a topic that finished after a cursor, and the cursor after them.

        Of many, one answer has the first ones.

        Args:
            topic: of the futures.
            cursor: from the answer before; 0 at the beginning.
            seconds: how long to wait for one to finish, where none has.
        """
        tenant_id = self._world.caller().tenant_id
        told = self._told.get((tenant_id, topic))
        # After one that was not given here, or one from before an answer that was lost, all of the overlap is told.
        known = (told if told is not None and told.cursor == cursor else _Told()).known
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + seconds
        while True:
            with self._world.bulletin.listening(topic_name(tenant_id, topic)) as news:
                ended = await self._look(tenant_id, topic, cursor, known)
                left = give_up_at - loop.time()
                if ended or left <= 0:
                    break
                await asyncio.wait({news}, timeout=left)
                if self._world.bulletin.is_closed:
                    break
        return ended, self._note(tenant_id, topic, cursor, {**known, **_moments(ended)}) if ended else cursor

    async def _look(self, tenant_id: str, topic: str, cursor: int, known: Mapping[str, datetime]) -> list[Future]:
        """Return what ended since shortly before a cursor and is not known: all until then, and some after it."""
        reached = _moment_of(cursor)
        since = reached - _OVERLAP if cursor else None
        found: dict[str, Future] = {}
        while True:
            ended = await self._world.store.list_ended(tenant_id, topic, since=since, limit=_AT_ONCE)
            found |= {future.future_id: future for future in ended if future.future_id not in known}
            last = ended[-1].finish_time if ended else None
            if len(ended) < _AT_ONCE or last is None or last == since or (found and last > reached):
                return list(found.values())
            since = last

    def _note(self, tenant_id: str, topic: str, cursor: int, known: Mapping[str, datetime]) -> int:
        """Remember what was told, and return the cursor after it, which is never one that was there before."""
        after = max(cursor + 1, *((moment - _START) // _MICROSECOND for moment in known.values()))
        oldest = _moment_of(after) - _OVERLAP
        self._told[tenant_id, topic] = _Told(after, {key: at for key, at in known.items() if at >= oldest})
        self._told.move_to_end((tenant_id, topic))
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        return after


def _moments(futures: Sequence[Future]) -> dict[str, datetime]:
    return {future.future_id: future.finish_time for future in futures if future.finish_time is not None}


def _moment_of(cursor: int) -> datetime:
    """Return until when whoever has a cursor was told all; clients may make up any number."""
    return _START + min(cursor, _MOST) * _MICROSECOND
