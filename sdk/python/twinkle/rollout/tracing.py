"""What a person sees of rollouts: each as a line of JSON, whether it succeeded, and a call for it."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinkle.rollout.episode import Rollout
from twinkle.rollout.errors import CallbackFailed
from twinkle.rollout.raised import Raised

TRACE_FILE = 'rollouts.jsonl'
"""In the folder of traces; appended to."""
SUCCESS = 'success'
"""The fact that `success_callback` makes: 1.0 or 0.0."""


class RolloutTracing:
    """Looks at the rollouts of each call, in order.

    Args:
        folder: for `TRACE_FILE`; made if it is not there. None: nothing is written.
        on_rollout: called with each rollout, once it is written.
        is_success: says of a rollout whether it reached its end; becomes the fact `SUCCESS`.

    Raises:
        ValueError: the folder is a file, or a callback cannot be called.
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
        """Return the rollouts, with the fact of their success where it was asked for.

        Raises:
            CallbackFailed: a callback raised; the rollouts before it were seen and written.
            ValueError: an environment has a fact of that name already.
            OSError: the disk refused.
        """
        seen: list[Rollout] = []
        # A call that a callback ends has been one: its lines are there.
        call_index, self._call_count = self._call_count, self._call_count + 1
        for rollout in rollouts:
            judged = self._judged(rollout)
            if self._path is not None:
                _append(self._path, trace_of(judged, call_index=call_index))
            if self._on_rollout is not None:
                _called('trace_callback', self._on_rollout, judged)
            seen.append(judged)
        return seen

    def _judged(self, rollout: Rollout) -> Rollout:
        if self._is_success is None:
            return rollout
        if SUCCESS in rollout.facts:
            raise ValueError(f'the environment reports a fact {SUCCESS!r} itself; leave success_callback out')
        is_success = bool(_called('success_callback', self._is_success, rollout))
        return replace(rollout, facts={**rollout.facts, SUCCESS: float(is_success)})


def trace_of(rollout: Rollout, *, call_index: int) -> dict[str, Any]:
    """Return what a line says of a rollout: all of it but its training feature, whose tokens it has."""
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
    # Images and their like have no place in JSON: their text stands in.
    line = json.dumps(trace, ensure_ascii=False, default=str)
    with path.open('a', encoding='utf-8') as file:
        file.write(line + '\n')


def _called(name: str, callback: Callable[[Rollout], object], rollout: Rollout) -> object:
    raised = Raised()
    with raised:
        return callback(rollout)
    if isinstance(raised.error, Exception):
        raise CallbackFailed(name, raised.error) from raised.error
    assert raised.error is not None  # noqa: S101 - the block ends in an answer or an error
    raise raised.error
