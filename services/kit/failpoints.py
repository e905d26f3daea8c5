"""Named points at which a test can kill the process, to simulate a crash. By default, no point is armed.

`TWINKLE_FAILPOINTS=journal.commit.before=3` kills the process with SIGKILL the third time that point is reached.
Several points are separated by commas. `TWINKLE_FAILPOINT_SIGNAL=SIGSEGV` sends another signal, to simulate a crash of
native code. All points are listed here, so that tests can iterate over them.
"""

import os
import signal
from collections import Counter
from collections.abc import Mapping

VARIABLE = 'TWINKLE_FAILPOINTS'
SIGNAL_VARIABLE = 'TWINKLE_FAILPOINT_SIGNAL'
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
"""Failpoints of operations, snapshots, restores and paging out in the model service."""
TRANSFER_FAILPOINTS = (
    'weights.chunk',
    'weights.received',
    'weights.verified',
    'weights.recorded',
    'weights.announced',
    'spill.begun',
    'spill.done',
)
"""Failpoints of a version in the checkpoint service, in order."""
FUTURE_FAILPOINTS = (
    'future.payload',
    'future.row',
    'future.numbering',
    'future.numbered',
    'future.executed',
    'future.result',
    'future.settled',
)
"""Failpoints of a future in the gateway, in order."""
PARKING_FAILPOINTS = (
    'park.taken',
    'park.saved',
    'park.recorded',
)
"""Failpoints of parking an adapter with unsaved steps, in order; `page_out.recorded` follows."""
TAKEOVER_FAILPOINTS = ('takeover.begun', 'takeover.copied', 'takeover.inserted', 'takeover.finished')
"""Failpoints of taking over the runs of an ended trainer, in order."""
EXPIRY_FAILPOINTS = ('expiry.saved', 'expiry.removed')
"""Failpoints of removing an unused adapter, in order, after the failpoints of parking."""
LOADER_FAILPOINTS = ('batch.fetched',)
"""Failpoint of an operation with a loader's batch, before the operation begins."""
ATTEMPT_FAILPOINTS = ('attempt.counted',)
"""Failpoint after counting an attempt at work that may crash the model service, and before the work begins."""
SESSION_FAILPOINTS = (
    'session.expired',
    'session.parked',
    'session.settled',
)
"""Failpoints of settling a session in the gateway, in order."""
REPLACEMENT_FAILPOINTS = (
    'replacement.staged',
    'replacement.begun',
    'replacement.tensor',
    'replacement.done',
    'replacement.served',
)
"""Failpoints of replacing a sampler's base model, in order."""


class Failpoints:
    """Counts how often each armed failpoint is reached, and kills the process at the armed count."""

    def __init__(self, armed: Mapping[str, int], *, death: signal.Signals = signal.SIGKILL) -> None:
        """Arm failpoints: the process sends itself `death` when a failpoint is reached as often as `armed` states.

        Raises:
            ValueError: A name is unknown, or a count is less than 1.
        """
        if any(count < 1 for count in armed.values()):
            raise ValueError(f'{VARIABLE} needs counts of at least 1, got {dict(armed)}')
        known = (
            *FAILPOINTS,
            *TRANSFER_FAILPOINTS,
            *FUTURE_FAILPOINTS,
            *PARKING_FAILPOINTS,
            *EXPIRY_FAILPOINTS,
            *TAKEOVER_FAILPOINTS,
            *LOADER_FAILPOINTS,
            *ATTEMPT_FAILPOINTS,
            *SESSION_FAILPOINTS,
            *REPLACEMENT_FAILPOINTS,
        )
        unknown = sorted(set(armed) - set(known))
        if unknown:
            raise ValueError(f'{VARIABLE} has unknown names {unknown}; known: {known}')
        self._armed = dict(armed)
        self._death = death
        self._counts: Counter[str] = Counter()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> 'Failpoints':
        """Return the failpoints that the environment arms.

        Raises:
            ValueError: A variable is malformed, names an unknown failpoint or signal, or has a count of less than 1.
        """
        items = [item.partition('=') for item in environment.get(VARIABLE, '').split(',') if item]
        death = environment.get(SIGNAL_VARIABLE) or 'SIGKILL'
        if death not in signal.Signals.__members__:
            raise ValueError(f'{SIGNAL_VARIABLE} must be the name of a signal, such as SIGSEGV; got {death!r}')
        return cls({name.strip(): int(count or '1') for name, _, count in items}, death=signal.Signals[death])

    def reach(self, name: str) -> None:
        """Count a failpoint, and kill the process if the armed count is reached."""
        if name not in self._armed:
            return
        self._counts[name] += 1
        if self._counts[name] == self._armed[name]:
            os.kill(os.getpid(), self._death)


_PROCESS_FAILPOINTS = Failpoints.from_environment(os.environ)


def reach(name: str) -> None:
    """Count a failpoint of this process, and kill the process if the armed count is reached."""
    _PROCESS_FAILPOINTS.reach(name)
