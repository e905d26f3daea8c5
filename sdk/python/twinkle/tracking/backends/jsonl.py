"""JSON files as a backend: one line for each log call and each rollout, and a description of the run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from twinkle.tracking.delivery import Status
from twinkle.tracking.rollouts import TrackedRollout
from twinkle.tracking.run import TrackedRun


class JsonlBackend:
    """Appends a line such as `{"step": 3, "loss": 0.5}` for each log call, and writes the line to the file immediately.

    The run is described in a second file with the suffix `.json`: id, names, tags, configuration, times and status,
    which is 'running' until the run ends. A run that is continued appends lines; for a repeated step, the last value of
    a name is valid. NaN and infinities are written as Python's json does. Rollouts are lines of a third file, with the
    suffix `.rollouts.jsonl`, which the first rollout creates; see `TrackedRollout.to_json`.

    Args:
        path: File for the numbers; its folder is created if necessary.

    Raises:
        ValueError: The path has the suffix `.json`.
    """

    name = 'jsonl'

    def __init__(self, path: Path) -> None:
        if path.suffix == '.json':
            raise ValueError(f'path: the description of the run needs the suffix .json; use .jsonl, got {path}')
        self._path = path
        self._description: dict[str, Any] = {}
        self._lines: IO[str]

    def start(self, run: TrackedRun) -> None:
        """Open the files.

        Raises:
            ValueError: The files belong to another run.
            OSError: The files cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        description_path = self._path.with_suffix('.json')
        found: dict[str, Any] = json.loads(description_path.read_text()) if description_path.exists() else {}
        if found and found.get('run_id') != run.run_id:
            raise ValueError(
                f'{description_path} belongs to run {found.get("run_id")!r}; pass this run_id to continue the run, or'
                ' choose another file'
            )
        self._description = {
            **asdict(run), 'create_time': found.get('create_time', _now()), 'end_time': None, 'status': 'running',
        }  # fmt: skip
        for path in (self._path, self._rollouts_path):
            _remove_partial_line(path)
        self._lines = self._path.open('a')
        self._save_description()

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._lines.write(json.dumps({'step': step, **values}) + '\n')
        self._lines.flush()

    def log_rollouts(self, rollouts: Sequence[TrackedRollout], *, step: int) -> None:
        # Values without a JSON form, such as objects in user data, are written as text.
        lines = [json.dumps({'step': step, **rollout.to_json()}, default=str) + '\n' for rollout in rollouts]
        with self._rollouts_path.open('a') as file:
            file.writelines(lines)

    @property
    def _rollouts_path(self) -> Path:
        return self._path.with_suffix('.rollouts.jsonl')

    def finish(self, status: Status) -> None:
        self._lines.close()
        self._description |= {'end_time': _now(), 'status': status}
        self._save_description()

    def _save_description(self) -> None:
        path = self._path.with_suffix('.json')
        partial = path.with_suffix('.json.partial')
        partial.write_text(json.dumps(self._description, indent=2) + '\n')
        partial.replace(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec='milliseconds')


def _remove_partial_line(path: Path) -> None:
    """Cut off a line that a killed process did not complete."""
    content = path.read_bytes() if path.exists() else b''
    if content and not content.endswith(b'\n'):
        path.write_bytes(content[: content.rfind(b'\n') + 1])
