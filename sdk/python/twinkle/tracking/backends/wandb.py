"""Weights & Biases as a backend, online or offline."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.tracking.backends.packages import required
from twinkle.tracking.delivery import Status
from twinkle.tracking.rollouts import TrackedRollout, rollout_table
from twinkle.tracking.run import TrackedRun


class WandbBackend:
    """Stores the run in Weights & Biases. `WANDB_MODE=offline` writes it to a folder, for `wandb sync`.

    The step is a metric and the axis of all charts, so steps may repeat and decrease, which wandb's own counter
    refuses; a repeated step is stored twice. The rollouts of a log call are a table with the name 'rollouts'.

    Args:
        folder: Folder for wandb's files, unless WANDB_DIR is set.

    Raises:
        MissingLibrary: wandb is not installed.
    """

    name = 'wandb'

    def __init__(self, folder: Path) -> None:
        self._wandb = required('wandb')
        self._folder = Path(os.environ.get('WANDB_DIR') or folder)
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        # wandb uses a temporary folder if this folder does not exist.
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=run.project,
            id=run.run_id,
            name=run.name,
            tags=run.tags,
            config=dict(run.config),
            dir=str(self._folder),
            resume='allow',
            reinit='create_new',
        )
        self._run.define_metric('step', hidden=True)
        self._run.define_metric('*', step_metric='step')

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log({'step': step, **values})

    def log_rollouts(self, rollouts: Sequence[TrackedRollout], *, step: int) -> None:
        columns, rows = rollout_table(rollouts, step=step)
        self._run.log({'step': step, 'rollouts': self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == 'finished' else 1)
