"""Background delivery of log calls to one backend, so that a slow or failing backend does not stop a program."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from twinkle.component import ErrorCapture
from twinkle.tracking.rollouts import TrackedRollout
from twinkle.tracking.run import TrackedRun

_log = logging.getLogger(__name__)

Status = Literal['finished', 'failed', 'interrupted']
"""How a run ended."""


class TrackerBackend(Protocol):
    """Stores the numbers of one run. To add another tracker, pass an object with these methods to `open_tracker`.

    Concurrency: `start` runs in the caller's thread; `log` and `finish` run one at a time in another thread.
    """

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    def start(self, run: TrackedRun) -> None:
        """Create the run, or continue the run with the same id. An error is raised to the caller of `open_tracker`."""
        ...

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Store numbers at a step. After an error, the values count as lost, and later values follow."""
        ...

    def finish(self, status: Status) -> None:
        """Store everything that `log` accepted, and end the run with the status."""
        ...


@runtime_checkable
class RolloutBackend(Protocol):
    """Method of a `TrackerBackend` that also stores rollouts. Backends without this method receive no rollouts."""

    def log_rollouts(self, rollouts: Sequence[TrackedRollout], *, step: int) -> None:
        """Store the rollouts of a step, in the thread of `log`. After an error, they count as one lost log call."""
        ...


@dataclass(frozen=True)
class _Call:
    """A backend call. The end of the run has no step."""

    step: int | None
    run: Callable[[], None]
    subject: Literal['values', 'rollouts'] = 'values'


class Delivery:
    """Calls a started backend in a thread, in order. Errors are logged and counted.

    Args:
        backend: Backend whose run was started.
        capacity: Maximum number of log calls that wait. Further calls are lost.
        rollout_capacity: Maximum number of these calls that log rollouts, which are larger than numbers.
    """

    def __init__(self, backend: TrackerBackend, *, capacity: int = 10_000, rollout_capacity: int = 64) -> None:
        self._backend, self._capacity, self._rollout_capacity = backend, capacity, rollout_capacity
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._running: _Call | None = None
        self._is_closed = self._is_abandoned = False
        self._lost_count = 0
        self._thread = threading.Thread(target=self._run, name=f'tracker-{backend.name}', daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self._backend.name

    @property
    def lost_count(self) -> int:
        """Number of log calls that the backend did not store."""
        return self._lost_count

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Add a log call without waiting."""
        self._add(_Call(step, lambda: self._backend.log(values, step=step)), self._capacity)

    def log_rollouts(self, rollouts: Sequence[TrackedRollout], *, step: int) -> None:
        """Add a call with rollouts without waiting, if the backend stores them."""
        backend = self._backend
        if isinstance(backend, RolloutBackend):
            call = _Call(step, lambda: backend.log_rollouts(rollouts, step=step), 'rollouts')
            self._add(call, self._rollout_capacity)

    def close(self, status: Status) -> None:
        """Add the end of the run after the waiting log calls, without waiting."""
        with self._changed:
            self._waiting.append(_Call(None, lambda: self._backend.finish(status)))
            self._is_closed = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Wait until the run has ended, for a limited time.

        After this time, waiting log calls are lost, and a call in progress continues until the process exits.
        """
        self._thread.join(seconds)
        with self._changed:
            self._is_abandoned = self._thread.is_alive()
            calls = [*self._waiting, *([self._running] if self._running else [])]
            unsent = sum(call.step is not None for call in calls) if self._is_abandoned else 0
            self._lost_count += unsent
            if unsent:
                self._waiting = deque(call for call in self._waiting if call.step is None)
        if self._is_abandoned:
            _log.warning('tracker %s did not end its run in time; unsent log calls: %d', self.name, unsent)
        if self._lost_count:
            _log.warning('tracker %s lost %d log calls', self.name, self._lost_count)

    def _add(self, call: _Call, capacity: int) -> None:
        with self._changed:
            if sum(waiting.subject == call.subject for waiting in self._waiting) >= capacity:
                self._lose(call, f'{capacity} log calls are waiting')
                return
            self._waiting.append(call)
            self._changed.notify_all()

    def _run(self) -> None:
        while call := self._next_call():
            capture = ErrorCapture()
            with capture:
                call.run()
            if capture.error is None:
                continue
            problem = f'{type(capture.error).__name__}: {capture.error}'
            if call.step is None:
                _log.warning('tracker %s did not end its run: %s', self.name, problem)
            else:
                self._lose(call, problem)

    def _next_call(self) -> _Call | None:
        """Wait for the next call; return None after the last call."""
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running

    def _lose(self, call: _Call, problem: str) -> None:
        """Count a lost log call. Only the first lost call is a warning, because a backend often fails at every step."""
        with self._changed:
            if self._is_abandoned:
                return
            self._lost_count += 1
            level = logging.WARNING if self._lost_count == 1 else logging.DEBUG
        _log.log(
            level,
            'tracker %s lost the %s of step %s, training continues: %s',
            *(self.name, call.subject, call.step, problem),
        )
