"""Detection of processes that ended or hang. A collective call would wait for them until its time limit."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from twinkle.blocking import join

_MAX_INTERVAL_SECONDS = 1.0
"""Maximum time between two heartbeats."""
_LATE_FACTOR = 4
"""Number of intervals after which this process is late with its check of the others."""
_CLOSED = 'closed'
"""Value in the store of a rank that ends intentionally."""


class RankWatch:
    """Writes heartbeats to the store of the program, and reports a launcher or a rank that is lost.

    The watch runs in a thread, so a rank sends heartbeats while it computes, but not while its process is stopped.

    Args:
        store: see `program_store`; used by this object only.
        rank: number of this process.
        size: number of processes.
        silence_seconds: time without a heartbeat after which a rank counts as lost.
        on_lost: called at most once, in the thread of this object, with a description of the loss.
        clock: time in seconds, for tests.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        silence_seconds: float,
        on_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._silence_seconds = silence_seconds
        self._interval_seconds = min(silence_seconds / 5, _MAX_INTERVAL_SECONDS)
        self._on_lost = on_lost
        self._clock = clock
        self._launcher_pid = os.getppid()
        self._count = 0
        self._checked_seconds = clock()
        others = [other for other in range(size) if other != rank]
        self._heartbeats = dict.fromkeys(others, b'')
        self._changed_seconds = dict.fromkeys(others, self._checked_seconds)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name='rank-watch', daemon=True)

    def start(self) -> None:
        """Start the heartbeats. Every rank must call it at about the same time."""
        self._thread.start()

    def close(self) -> None:
        """Stop the watch, and tell the other ranks that this rank ends intentionally."""
        self._is_closing.set()
        join(self._thread)

    def check(self) -> str:
        """Send a heartbeat, read the heartbeats of other ranks, and return a description of the first loss, or ''.

        Raises:
            RuntimeError: the store was lost.
        """
        if os.getppid() != self._launcher_pid:
            return 'the launcher ended'
        self._count += 1
        self._store.set(self._key(self._rank), str(self._count))
        previous_seconds, now = self._checked_seconds, self._clock()
        self._checked_seconds = now
        if now - previous_seconds > _LATE_FACTOR * self._interval_seconds:
            # This process was stopped, probably together with the others, so missing heartbeats are no sign of a loss.
            self._changed_seconds = dict.fromkeys(self._changed_seconds, now)
        for other, changed_seconds in self._changed_seconds.items():
            heartbeat = self._store.get(self._key(other)) if self._store.check([self._key(other)]) else b''
            if heartbeat != self._heartbeats[other] or heartbeat == _CLOSED.encode():
                self._heartbeats[other], self._changed_seconds[other] = heartbeat, now
            elif now - changed_seconds > self._silence_seconds:
                return f'rank {other} has not responded for {now - changed_seconds:.0f} s'
        return ''

    def _run(self) -> None:
        while not self._is_closing.wait(self._interval_seconds):
            try:
                problem = self.check()
            except RuntimeError:
                # The launcher hosts the store.
                problem = 'the launcher, or the process that hosts its store, ended'
            if problem:
                self._on_lost(problem)
                return
        with suppress(RuntimeError):
            self._store.set(self._key(self._rank), _CLOSED)

    @staticmethod
    def _key(rank: int) -> str:
        return f'heartbeat-{rank}'
