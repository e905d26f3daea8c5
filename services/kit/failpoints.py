"""Named places at which a test can end the process, as a power cut would. Off unless the environment says so.

`TWINKLE_FAILPOINTS=journal.accept.before=3` ends the process with SIGKILL the third time that place is reached.
Several are joined by commas. Every place is listed here, so that a test can go through all of them.
"""

import os
import signal
from collections import Counter
from collections.abc import Mapping

VARIABLE = 'TWINKLE_FAILPOINTS'
FAILPOINTS = (
    'operation.begun',
    'operation.computed',
    'operation.answered',
    'journal.payload.written',
    'journal.commit.before',
    'journal.commit.after',
    'snapshot.taken',
    'snapshot.written',
    'snapshot.recorded',
    'state_verb.done',
    'restore.begun',
    'restore.replaying',
    'page_out.recorded',
)
"""In the order in which an operation comes to them."""
TRANSFER_FAILPOINTS = (
    'weights.chunk',
    'weights.received',
    'weights.verified',
    'weights.recorded',
    'weights.announced',
    'spill.begun',
    'spill.done',
)
"""In the order in which a version comes to them on its way through the checkpoint service."""
FUTURE_FAILPOINTS = (
    'future.payload',
    'future.row',
    'future.numbering',
    'future.numbered',
    'future.executed',
    'future.result',
    'future.settled',
)
"""In the order in which an operation comes to them in the gateway."""
PARKING_FAILPOINTS = (
    'park.taken',
    'park.saved',
    'park.recorded',
)
"""In the order in which an adapter with unsaved steps comes to them when it is parked; `page_out.recorded` follows."""
LOADER_FAILPOINTS = ('batch.fetched',)
"""Where an operation comes whose batch is a loader's, before it is begun."""
SESSION_FAILPOINTS = (
    'session.expired',
    'session.parked',
    'session.settled',
)
"""In the order in which a session comes to them in the gateway when it ends."""
REPLACEMENT_FAILPOINTS = (
    'replacement.staged',
    'replacement.begun',
    'replacement.tensor',
    'replacement.done',
    'replacement.served',
)
"""In the order in which a whole model comes to them that replaces a sampler's base model."""


class Failpoints:
    """Counts how often each armed place is reached."""

    def __init__(self, armed: Mapping[str, int]) -> None:
        """Arm places: the process ends the given time each is reached.

        Raises:
            ValueError: a name is not listed above, or a time is not at least 1.
        """
        if any(count < 1 for count in armed.values()):
            raise ValueError(f'{VARIABLE} counts from 1, got {dict(armed)}')
        known = (
            *FAILPOINTS,
            *TRANSFER_FAILPOINTS,
            *FUTURE_FAILPOINTS,
            *PARKING_FAILPOINTS,
            *LOADER_FAILPOINTS,
            *SESSION_FAILPOINTS,
            *REPLACEMENT_FAILPOINTS,
        )
        unknown = sorted(set(armed) - set(known))
        if unknown:
            raise ValueError(f'{VARIABLE} names {unknown}; there are {known}')
        self._armed = dict(armed)
        self._counts: Counter[str] = Counter()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> 'Failpoints':
        """Return those that the environment arms.

        Raises:
            ValueError: the variable is malformed or names an unknown place.
        """
        items = [item.partition('=') for item in environment.get(VARIABLE, '').split(',') if item]
        return cls({name.strip(): int(count or '1') for name, _, count in items})

    def reach(self, name: str) -> None:
        """Pass a place; the process ends here if it is armed and this is the time."""
        if name not in self._armed:
            return
        self._counts[name] += 1
        if self._counts[name] == self._armed[name]:
            os.kill(os.getpid(), signal.SIGKILL)


_OF_THIS_PROCESS = Failpoints.from_environment(os.environ)


def reach(name: str) -> None:
    """Pass a place of this process."""
    _OF_THIS_PROCESS.reach(name)
