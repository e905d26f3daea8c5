"""What is reported of training: numbers by name, never strings. Loads no torch."""

from twinkle.metric.base import ForwardFacts, Metric, StepFacts
from twinkle.metric.loss_metric import LossMetric
from twinkle.metric.registry import METRICS
from twinkle.metric.train_metric import TrainMetric

__all__ = ['METRICS', 'ForwardFacts', 'LossMetric', 'Metric', 'StepFacts', 'TrainMetric']
