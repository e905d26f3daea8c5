"""Experiment tracking: one interface to log numbers and rollouts of a run to the services, files and other trackers.

`open_tracker` opens a run in one or several backends. Packages of other trackers are imported when their backend is
used.
"""

from twinkle.tracking.backends.jsonl import JsonlBackend
from twinkle.tracking.backends.mlflow import MlflowBackend
from twinkle.tracking.backends.service import MetricStore, RolloutStore, ServiceBackend
from twinkle.tracking.backends.tensorboard import TensorboardBackend
from twinkle.tracking.backends.trackio import TrackioBackend
from twinkle.tracking.backends.wandb import WandbBackend
from twinkle.tracking.delivery import RolloutBackend, Status, TrackerBackend
from twinkle.tracking.opening import TRACKERS, check_trackers, open_tracker
from twinkle.tracking.rollouts import TrackedRollout, tracked_rollouts
from twinkle.tracking.run import RunOptions, TrackedRun
from twinkle.tracking.tracker import Tracker
from twinkle.tracking.values import number_of

__all__ = [
    'TRACKERS',
    'JsonlBackend',
    'MetricStore',
    'MlflowBackend',
    'RolloutBackend',
    'RolloutStore',
    'RunOptions',
    'ServiceBackend',
    'Status',
    'TensorboardBackend',
    'TrackedRollout',
    'TrackedRun',
    'Tracker',
    'TrackerBackend',
    'TrackioBackend',
    'WandbBackend',
    'check_trackers',
    'number_of',
    'open_tracker',
    'tracked_rollouts',
]
