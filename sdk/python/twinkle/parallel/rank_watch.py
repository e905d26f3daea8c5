"""Detection of processes that ended or hang. A collective call would wait for them until its time limit."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

_MAX_INTERVAL_SECONDS = 1.0
_CLOSED = 'closed'
"""Value in the store of a rank that ends on purpose."""


class RankWatch:
    """Counts in the store of the program, and checks that the launcher runs and that all other ranks count.

    It runs in a thread, so a rank counts while it computes, but not while it is stopped or frozen.

    Args:
        store: see `program_store`; used by this object only.
        rank: number of this process.
        size: number of processes.
        silence_seconds: time without a new count after which a rank counts as lost.
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
        self._launcher = os.getppid()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name='rank-watch', daemon=True)

    def start(self) -> None:
        """Start counting. Every rank must call it at about the same time."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and tell the other ranks that this one ends on purpose."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        counts = dict.fromkeys(self._others, b'')
        changed = dict.fromkeys(self._others, time.monotonic())
        number = 0
        while not self._is_closing.wait(self._interval_seconds):
            number += 1
            try:
                problem = self._problem(number, counts, changed)
            except RuntimeError:
                # The launcher hosts the store.
                problem = 'the launcher, or the process that hosts its store, ended'
            if problem:
                self._on_lost(problem)
                return
        with suppress(RuntimeError):
            self._store.set(self._key(self._rank), _CLOSED)

    def _problem(self, number: int, counts: dict[int, bytes], changed: dict[int, float]) -> str:
        """Count, update the counts of the other ranks, and return the first problem, or an empty string."""
        if os.getppid() != self._launcher:
            return 'the launcher ended'
        self._store.set(self._key(self._rank), str(number))
        now = time.monotonic()
        for other in self._others:
            count = self._store.get(self._key(other)) if self._store.check([self._key(other)]) else b''
            if count != counts[other] or count == _CLOSED.encode():
                counts[other], changed[other] = count, now
            elif now - changed[other] > self._silence_seconds:
                return f'rank {other} has not responded for {now - changed[other]:.0f} s'
        return ''

    @staticmethod
    def _key(rank: int) -> str:
        return f'count-{rank}'
