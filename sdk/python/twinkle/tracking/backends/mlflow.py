"""MLflow as a backend: a server, or a SQLite file."""

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.tracking.backends.packages import required
from twinkle.tracking.delivery import Status
from twinkle.tracking.rollouts import TrackedRollout
from twinkle.tracking.run import TrackedRun

_ID_TAG = 'twinkle.run_id'
_STATUSES: Mapping[Status, str] = {'finished': 'FINISHED', 'failed': 'FAILED', 'interrupted': 'KILLED'}


class MlflowBackend:
    """Stores the run in MLflow, at MLFLOW_TRACKING_URI or in `mlflow.db` in the folder.

    The project is an experiment. MLflow chooses the ids of runs, so the run's id is the tag `twinkle.run_id`. The
    configuration becomes parameters, which cannot change: a continued run keeps its first values. A repeated step is
    stored twice. The rollouts of a log call are an artifact with a JSON line for each, such as
    `rollouts/step-3-0.jsonl`; the last number counts the log calls of the step.

    Args:
        folder: Folder for the SQLite file, unless MLFLOW_TRACKING_URI is set.

    Raises:
        MissingLibrary: mlflow-skinny is not installed.
    """

    name = 'mlflow'

    def __init__(self, folder: Path) -> None:
        self._mlflow = required('mlflow')
        self._entities = required('mlflow', module='mlflow.entities')
        self._folder = folder
        self._client: Any = None
        self._mlflow_id = ''

    def start(self, run: TrackedRun) -> None:
        artifacts = None
        uri = os.environ.get('MLFLOW_TRACKING_URI')
        if not uri:
            self._folder.mkdir(parents=True, exist_ok=True)
            uri = f'sqlite:///{self._folder.absolute() / "mlflow.db"}'
            artifacts = (self._folder.absolute() / 'mlflow-artifacts').as_uri()
        self._client = self._mlflow.MlflowClient(uri)
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            self._client.create_experiment(run.project, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        found = self._client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{run.run_id}'")
        created = found[0] if found else self._client.create_run(experiment_id, tags={_ID_TAG: run.run_id})
        self._mlflow_id = created.info.run_id
        self._client.update_run(self._mlflow_id, status='RUNNING', name=run.name)
        self._client.set_tag(self._mlflow_id, 'twinkle.tags', json.dumps(run.tags))
        new = {key: value for key, value in run.flat_config.items() if key not in created.data.params}
        self._client.log_batch(self._mlflow_id, params=[self._entities.Param(key, str(new[key])) for key in new])

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        moment = time.time_ns() // 1_000_000
        points = [self._entities.Metric(name, value, moment, step) for name, value in values.items()]
        self._client.log_batch(self._mlflow_id, metrics=points)

    def log_rollouts(self, rollouts: Sequence[TrackedRollout], *, step: int) -> None:
        lines = [json.dumps(rollout.to_json(), default=str) + '\n' for rollout in rollouts]
        known = {file.path for file in self._client.list_artifacts(self._mlflow_id, 'rollouts')}
        path = next(path for call in itertools.count() if (path := f'rollouts/step-{step}-{call}.jsonl') not in known)
        self._client.log_text(self._mlflow_id, ''.join(lines), path)

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._mlflow_id, _STATUSES[status])
