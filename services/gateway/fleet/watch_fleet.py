"""The verb that follows the fleet."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from services.gateway.fleet.membership import Membership
from services.gateway.fleet.rules import Replica
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import InvalidField
from services.kit.ids import new_id


@dataclass(frozen=True, kw_only=True)
class FleetEvent:
    """What a watch tells: one of a member as it stands, an id that left, or that the snapshot is whole."""

    resume_token: str
    replica: Replica | None = None
    left_replica_id: str = ''


class WatchFleet:
    """Tells of all members, then of changes. A slow watcher is told of each member's last state only."""

    def __init__(self, membership: Membership) -> None:
        """Watch `membership`."""
        self._membership = membership
        self._epoch = new_id('fl')

    async def __call__(self, caller: Caller, resume_token: str) -> AsyncGenerator[FleetEvent, None]:
        """Yield a snapshot, an event with nothing but a token, then changes; with a token, changes after it.

        It ends when the gateway is about to stop.

        Raises:
            ScopeMissing: the caller is no operator.
            InvalidField: the token is too old, or from before a restart.
        """
        require_scope(caller, 'operator')
        revision = self._parse(resume_token) if resume_token else 0
        if not resume_token:
            now = self._membership.fleet.revision
            for replica in self._membership.fleet.changes_after(0)[0]:
                yield FleetEvent(resume_token='', replica=replica)
            revision = now
            yield FleetEvent(resume_token=self._token(revision))
        while True:
            await self._membership.wait_for_change(revision)
            fleet = self._membership.fleet
            if self._membership.is_closing.is_set():
                return
            if revision < fleet.oldest_revision:
                raise _too_old()
            (changed, left), now = fleet.changes_after(revision), fleet.revision
            before, revision = self._token(revision), now
            events = [FleetEvent(resume_token=before, left_replica_id=replica_id) for replica_id in left]
            events += [FleetEvent(resume_token=before, replica=replica) for replica in changed]
            for event in events[:-1]:
                yield event
            for event in events[-1:]:
                yield FleetEvent(
                    resume_token=self._token(now), replica=event.replica, left_replica_id=event.left_replica_id
                )

    def _token(self, revision: int) -> str:
        return f'{self._epoch}.{revision}'

    def _parse(self, token: str) -> int:
        epoch, _, number = token.partition('.')
        if epoch != self._epoch or not number.isascii() or not number.isdigit() or len(number) > 18:
            raise _too_old()
        revision = int(number)
        if not self._membership.fleet.oldest_revision <= revision <= self._membership.fleet.revision:
            raise _too_old()
        return revision


def _too_old() -> InvalidField:
    return InvalidField('resume_token', 'is too old or from before a restart; begin with an empty one')
