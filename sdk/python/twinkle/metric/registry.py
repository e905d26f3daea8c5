"""Metrics by name."""

from twinkle.component import ComponentRegistry
from twinkle.metric.base import Metric
from twinkle.metric.loss_metric import LossMetric
from twinkle.metric.train_metric import TrainMetric

METRICS = ComponentRegistry('metric', Metric, (LossMetric, TrainMetric))
"""Metrics by name."""
