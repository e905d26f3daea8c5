"""Tracing of rollouts: a JSON Lines file and the user's callbacks."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinkle.component import ErrorCapture
from twinkle.rollout.episode import Rollout
from twinkle.rollout.errors import CallbackFailed

TRACE_FILE = 'rollouts.jsonl'
"""Name of the file in the trace folder; lines are appended."""
SUCCESS = 'success'
"""Name of the fact that `success_callback` sets to 1.0 or 0.0."""


class RolloutTracing:
    """Writes the rollouts of each call to a file and passes them to callbacks, in order.

    Args:
        folder: folder of `TRACE_FILE`, created if it does not exist. None: no file is written.
        on_rollout: called with each rollout after it is written.
        is_success: returns whether a rollout succeeded. The result becomes the fact `SUCCESS`.

    Raises:
        ValueError: the folder is a file, or a callback is not callable.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        on_rollout: Callable[[Rollout], object] | None = None,
        is_success: Callable[[Rollout], object] | None = None,
    ) -> None:
        for name, callback in (('trace_callback', on_rollout), ('success_callback', is_success)):
            if callback is not None and not callable(callback):
                raise ValueError(f'{name} must be a function of a rollout, got {callback!r}')
        self._path = None if folder is None else Path(folder) / TRACE_FILE
        if self._path is not None and self._path.parent.exists() and not self._path.parent.is_dir():
            raise ValueError(f'trace_dir must be a folder, got the file {folder}')
        self._on_rollout, self._is_success = on_rollout, is_success
        self._call_count = 0

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Trace the rollouts, and return them with the fact `SUCCESS` if `is_success` is set.

        Raises:
            CallbackFailed: a callback raised an error. Earlier rollouts have been written and passed to the callbacks.
            ValueError: the environment already has a fact named `SUCCESS`.
            OSError: the file cannot be written.
        """
        traced: list[Rollout] = []
        # The index is not reused if a callback fails, because lines with it may already be written.
        call_index, self._call_count = self._call_count, self._call_count + 1
        for rollout in rollouts:
            rated = self._with_success(rollout)
            if self._path is not None:
                _append(self._path, trace_of(rated, call_index=call_index))
            if self._on_rollout is not None:
                _run_callback('trace_callback', self._on_rollout, rated)
            traced.append(rated)
        return traced

    def _with_success(self, rollout: Rollout) -> Rollout:
        if self._is_success is None:
            return rollout
        if SUCCESS in rollout.facts:
            raise ValueError(f'the environment already reports a fact {SUCCESS!r}; do not pass success_callback')

        is_success = bool(_run_callback('success_callback', self._is_success, rollout))
        return replace(rollout, facts={**rollout.facts, SUCCESS: float(is_success)})


def trace_of(rollout: Rollout, *, call_index: int) -> dict[str, Any]:
    """Return the JSON object of a rollout: all fields except the feature, from which only the tokens are included."""
    return {
        'call_index': call_index,
        'trajectory_index': rollout.trajectory_index,
        'sample_index': rollout.sample_index,
        'end_reason': str(rollout.end_reason),
        'turn_count': rollout.turn_count,
        'reward': rollout.reward,
        'rewards': rollout.rewards,
        'facts': rollout.facts,
        'version_spans': [[span.version, span.begin_token, span.end_token] for span in rollout.version_spans],
        'input_ids': [int(token_id) for token_id in rollout.feature.get('input_ids', ())],
        'messages': rollout.messages,
    }


def _append(path: Path, trace: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Values without a JSON form, such as images, are written as text.
    line = json.dumps(trace, ensure_ascii=False, default=str)
    with path.open('a', encoding='utf-8') as file:
        file.write(line + '\n')


def _run_callback(name: str, callback: Callable[[Rollout], object], rollout: Rollout) -> object:
    capture = ErrorCapture()
    with capture:
        return callback(rollout)
    if isinstance(capture.error, Exception):
        raise CallbackFailed(name, capture.error) from capture.error
    assert capture.error is not None  # noqa: S101 - the block either returns or raises
    raise capture.error
