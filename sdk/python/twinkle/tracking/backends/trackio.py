"""Trackio as a backend: local-first, with a dashboard in the browser."""

import contextvars
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.tracking.backends.packages import required
from twinkle.tracking.delivery import Status
from twinkle.tracking.rollouts import TrackedRollout, rollout_table
from twinkle.tracking.run import TrackedRun


class TrackioBackend:
    """Stores the run in Trackio, by default in a local database; `trackio show` opens its dashboard.

    Trackio's variables select other destinations: TRACKIO_DIR a folder, TRACKIO_SPACE_ID a Space, TRACKIO_SERVER_URL a
    server. Trackio identifies runs by their names, so the run's id is its name in Trackio, and the tags are part of the
    configuration. A repeated step is stored twice. Trackio stores no status. The rollouts of a log call are a table
    with the name 'rollouts'.

    Raises:
        MissingLibrary: trackio is not installed.
    """

    name = 'trackio'

    def __init__(self) -> None:
        self._trackio = required('trackio')
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        config = {**run.config, 'run_name': run.name, 'tags': list(run.tags)}
        # Trackio ends the run that was opened before in the same context, so each run has a separate context.
        self._run = contextvars.Context().run(
            self._trackio.init, project=run.project, name=run.run_id, config=config, resume='allow'
        )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def log_rollouts(self, rollouts: Sequence[TrackedRollout], *, step: int) -> None:
        columns, rows = rollout_table(rollouts, step=step)
        self._run.log({'rollouts': self._trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self, status: Status) -> None:
        del status
        self._run.finish()
