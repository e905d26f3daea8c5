"""The tracker of a run, which passes numbers and rollouts to all backends."""

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, SupportsIndex

from twinkle.tracking.delivery import Delivery, Status, TrackerBackend
from twinkle.tracking.rollouts import tracked_rollouts
from twinkle.tracking.run import TrackedRun
from twinkle.tracking.values import checked_step, checked_values

_INTERRUPTED_SECONDS = 10.0
"""Maximum time that an interrupted or failed program waits for the backends."""


class Tracker:
    """Logs the numbers and rollouts of a run in several backends. `open_tracker` creates it.

    A log call never waits for a backend. If a backend fails or is too slow, its values are lost. The tracker then logs
    a warning and counts the loss in `lost_counts`; the program and the other backends continue.

    Use the tracker as a context manager, or call `finish`. Otherwise the program may exit before all values are stored.

    Args:
        run: Description of the run.
        backends: Backends to use. If a backend cannot start, the other backends end and the error is raised.
        finish_timeout: Maximum time in seconds that `finish` waits for all backends. An interrupted or failed run
            waits for at most 10 seconds.

    Concurrency: any thread may log.
    """

    def __init__(self, run: TrackedRun, backends: Iterable[TrackerBackend], *, finish_timeout: float = 60.0) -> None:
        self.run = run
        self._timeout = finish_timeout
        self._is_finished = False
        self._deliveries: list[Delivery] = []
        for backend in backends:
            try:
                backend.start(run)
            except BaseException as error:
                error.add_note(f'tracker {backend.name!r} could not open run {run.run_id!r}')
                self.finish('failed')
                raise
            self._deliveries.append(Delivery(backend))

    @property
    def lost_counts(self) -> dict[str, int]:
        """Number of log calls that were lost, by name of the backend."""
        return {delivery.name: delivery.lost_count for delivery in self._deliveries}

    def log(self, values: Mapping[str, Any], *, step: SupportsIndex) -> None:
        """Log numbers at a step. Invalid values are refused before any backend receives them.

        Args:
            values: Python, NumPy or torch numbers by name. A name has up to 128 letters, digits and `_ - . :`, with
                `/` between parts.
            step: Step of the program, at least 0. Steps may repeat; docs/tracking.md has a table of what the backends
                store.

        Raises:
            TypeError: A value is not a number, or the step is not an integer.
            ValueError: A name or the step is invalid.
            RuntimeError: The run has ended.
        """
        numbers, number = checked_values(values), checked_step(step)
        self._check_open()
        for delivery in self._deliveries:
            delivery.log(numbers, step=number)

    def log_rollouts(
        self,
        trajectories: Any,
        *,
        step: SupportsIndex,
        rewards: Any = None,
        advantages: Any = None,
        reward_parts: Mapping[str, Any] | None = None,
        groups: int | Sequence[str] | None = None,
    ) -> None:
        """Log completions with their prompts and rewards in the backends that store rollouts.

        Args:
            trajectories: Results of a sampler, their sequences, rollouts of `twinkle.rollout`, features or chats. Inner
                lists are groups.
            step: Step of the program, at least 0.
            rewards: Reward of each completion, in order. Unset: the rewards of rollouts of `twinkle.rollout`.
            advantages: Advantage of each completion, or a list with the advantage of each of its tokens.
            reward_parts: Parts of the rewards by name, each with a value for each completion.
            groups: Number of consecutive completions that form a group, or the id of the group of each completion.
                Unset: the completions of one response, of one inner list or of one trajectory form a group.

        Raises:
            TypeError: A completion has an unknown type, or the step is not an integer.
            ValueError: The number of rewards, advantages or groups is wrong, a value is not a number, or the step is
                invalid.
            RuntimeError: The run has ended.
        """
        number = checked_step(step)
        rollouts = tracked_rollouts(
            trajectories, rewards=rewards, advantages=advantages, reward_parts=reward_parts, groups=groups
        )
        self._check_open()
        for delivery in self._deliveries:
            delivery.log_rollouts(rollouts, step=number)

    def finish(self, status: Status = 'finished') -> None:
        """End the run in all backends, and wait until all values are stored. Finishing again has no effect."""
        if self._is_finished:
            return
        self._is_finished = True
        seconds = self._timeout if status == 'finished' else min(self._timeout, _INTERRUPTED_SECONDS)
        end = time.monotonic() + seconds
        for delivery in self._deliveries:
            delivery.close(status)
        for delivery in self._deliveries:
            delivery.join(max(end - time.monotonic(), 0.0))

    def _check_open(self) -> None:
        if self._is_finished:
            raise RuntimeError(f'run {self.run.run_id!r} has ended; open it again with its run_id to log more')

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run. Its status is 'failed' after an error of the block, and 'interrupted' after Ctrl-C."""
        del trace
        if kind is None or (isinstance(error, SystemExit) and not error.code):
            self.finish('finished')
        else:
            self.finish('interrupted' if issubclass(kind, KeyboardInterrupt) else 'failed')
