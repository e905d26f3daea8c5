"""Opening of a tracked run in the backends that a program names."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from twinkle.component import UnknownComponent
from twinkle.tracking.backends.jsonl import JsonlBackend
from twinkle.tracking.backends.mlflow import MlflowBackend
from twinkle.tracking.backends.packages import required
from twinkle.tracking.backends.service import MetricStore, RolloutStore, ServiceBackend
from twinkle.tracking.backends.tensorboard import TensorboardBackend
from twinkle.tracking.backends.trackio import TrackioBackend
from twinkle.tracking.backends.wandb import WandbBackend
from twinkle.tracking.delivery import TrackerBackend
from twinkle.tracking.run import RunOptions, TrackedRun
from twinkle.tracking.tracker import Tracker

TRACKERS = ('service', 'jsonl', 'trackio', 'wandb', 'mlflow', 'tensorboard')
"""Names of the backends."""
_LIBRARIES = frozenset({'trackio', 'wandb', 'mlflow', 'tensorboard'})
"""Backends that need the library of the same name."""


def check_trackers(trackers: str) -> list[str]:
    """Return the backend names in a comma-separated text, after checking that each backend is known and installed.

    Raises:
        UnknownComponent: A name is unknown. It is a ValueError.
        ValueError: A name occurs twice.
        MissingLibrary: The package of a backend is not installed. It is an ImportError that names the pip command.
    """
    names = [name.strip() for name in trackers.split(',') if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise UnknownComponent('tracker', name, TRACKERS)
        if names.count(name) > 1:
            raise ValueError(f'trackers: {name!r} is named twice')
        if name in _LIBRARIES:
            required(name)
    return names


def open_tracker(
    trackers: str | Sequence[str | TrackerBackend] | None = None,
    *,
    metrics: MetricStore | None = None,
    rollouts: RolloutStore | None = None,
    folder: str | os.PathLike[str] = 'runs',
    finish_timeout: float = 60.0,
    **run: Unpack[RunOptions],
) -> Tracker:
    """Open a run in one or several backends; an existing run with the same id is continued.

    Under torchrun, open the run in the first process only, or pass an empty list in the other processes.

    Args:
        trackers: Names from `TRACKERS` with commas between them, or a list of names and backends. None: the services'
            store if `metrics` is given, otherwise no backend.
        metrics: `model.metrics()` of `twinkle_client`, for the backend 'service'.
        rollouts: `model.rollouts()` of `twinkle_client`, where the backend 'service' stores rollouts. None: the
            backend stores numbers only.
        folder: Folder for the files of local backends. The environment variables of a tracker override it, such as
            WANDB_DIR, MLFLOW_TRACKING_URI and TRACKIO_DIR.
        finish_timeout: See `Tracker`.
        run: See `RunOptions`.

    Raises:
        UnknownComponent: A name is unknown. It is a ValueError.
        MissingLibrary: The package of a backend is not installed. It is an ImportError that names the pip command.
        TypeError: An option has the wrong type.
        ValueError: An option is invalid, or a backend refused the run.
    """
    if trackers is None:
        trackers = () if metrics is None else 'service'
    listed = check_trackers(trackers) if isinstance(trackers, str) else trackers
    if metrics is not None:
        run.setdefault('run_id', metrics.run_id)
    described = TrackedRun.make(run)
    service = None if metrics is None else ServiceBackend(metrics, rollouts)
    backends = [_backend(item, described, Path(folder), service) if isinstance(item, str) else item for item in listed]
    names = [backend.name for backend in backends]
    if rollouts is not None and 'service' not in names:
        raise ValueError("rollouts: needs the tracker 'service' and metrics=model.metrics()")
    if len(set(names)) < len(names):
        raise ValueError(f'trackers: {names} names a backend twice; name each backend once')
    return Tracker(described, backends, finish_timeout=finish_timeout)


def _backend(name: str, run: TrackedRun, folder: Path, service: ServiceBackend | None) -> TrackerBackend:
    match name:
        case 'service':
            if service is None:
                raise ValueError("trackers: 'service' needs metrics=model.metrics() of a model of twinkle_client")
            return service
        case 'jsonl':
            return JsonlBackend(folder / run.project / f'{run.run_id}.jsonl')
        case 'trackio':
            return TrackioBackend()
        case 'wandb':
            return WandbBackend(folder)
        case 'mlflow':
            return MlflowBackend(folder)
        case 'tensorboard':
            return TensorboardBackend(folder / run.project / run.run_id)
        case _:
            raise UnknownComponent('tracker', name, TRACKERS)
