"""Detection of processes that ended or hang. A collective call would wait for them until its time limit."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

_MAX_INTERVAL_SECONDS = 1.0
_LATE_FACTOR = 4
"""Number of intervals after which a heartbeat of this process counts as late."""
_CLOSED = 'closed'
"""Value in the store of a rank that ends on purpose."""


class RankWatch:
    """Writes heartbeats to the store of the program, and reports a launcher or a rank that is lost.

    It runs in a thread, so a rank sends heartbeats while it computes, but not while it is stopped or frozen.

    Args:
        store: see `program_store`; used by this object only.
        rank: number of this process.
        size: number of processes.
        silence_seconds: time without a heartbeat after which a rank counts as lost.
        on_lost: called once, in the thread of this object, with a description of the loss.
    """

    def __init__(
        self, store: Store, *, rank: int, size: int, silence_seconds: float, on_lost: Callable[[str], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._silence_seconds = silence_seconds
        self._interval_seconds = min(silence_seconds / 5, _MAX_INTERVAL_SECONDS)
        self._on_lost = on_lost
        self._launcher_pid = os.getppid()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name='rank-watch', daemon=True)

    def start(self) -> None:
        """Start the heartbeats. Every rank must call it at about the same time."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and tell the other ranks that this one ends on purpose."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        heartbeats = dict.fromkeys(self._others, b'')
        last_change_seconds = dict.fromkeys(self._others, time.monotonic())
        number, turn_seconds = 0, time.monotonic()
        while not self._is_closing.wait(self._interval_seconds):
            number, previous_seconds, turn_seconds = number + 1, turn_seconds, time.monotonic()
            if turn_seconds - previous_seconds > _LATE_FACTOR * self._interval_seconds:
                # This process was stopped, probably together with the others, so their silence means nothing.
                last_change_seconds = dict.fromkeys(self._others, turn_seconds)
            try:
                problem = self._beat_and_check(number, heartbeats, last_change_seconds)
            except RuntimeError:
                # The launcher hosts the store.
                problem = 'the launcher, or the process that hosts its store, ended'
            if problem:
                self._on_lost(problem)
                return
        with suppress(RuntimeError):
            self._store.set(self._key(self._rank), _CLOSED)

    def _beat_and_check(self, number: int, heartbeats: dict[int, bytes], last_change_seconds: dict[int, float]) -> str:
        """Send a heartbeat, read those of the other ranks, and return the first problem, or an empty string."""
        if os.getppid() != self._launcher_pid:
            return 'the launcher ended'
        self._store.set(self._key(self._rank), str(number))
        now = time.monotonic()
        for other in self._others:
            heartbeat = self._store.get(self._key(other)) if self._store.check([self._key(other)]) else b''
            silent_seconds = now - last_change_seconds[other]
            if heartbeat != heartbeats[other] or heartbeat == _CLOSED.encode():
                heartbeats[other], last_change_seconds[other] = heartbeat, now
            elif silent_seconds > self._silence_seconds:
                return f'rank {other} has not responded for {silent_seconds:.0f} s'
        return ''

    @staticmethod
    def _key(rank: int) -> str:
        return f'heartbeat-{rank}'
