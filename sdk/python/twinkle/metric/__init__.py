"""Metrics of training. Each metric reports floats by name. The package does not import torch."""

from twinkle.metric.accuracy import Accuracy
from twinkle.metric.base import FACT_NAMES, ForwardFacts, LabelFacts, Metric, MetricState, StepFacts
from twinkle.metric.completion_reward import CompletionRewardMetric
from twinkle.metric.counting import CountingMetric
from twinkle.metric.dpo import DPOMetric
from twinkle.metric.embedding import EmbeddingMetric
from twinkle.metric.grpo import GRPOMetric
from twinkle.metric.loss_metric import LossMetric
from twinkle.metric.policy_variants import CISPOMetric, GSPOMetric, PPOMetric
from twinkle.metric.ppo_value import PPOValueMetric
from twinkle.metric.registry import METRICS
from twinkle.metric.train_metric import TrainMetric

__all__ = [
    'FACT_NAMES',
    'METRICS',
    'Accuracy',
    'CISPOMetric',
    'CompletionRewardMetric',
    'CountingMetric',
    'DPOMetric',
    'EmbeddingMetric',
    'ForwardFacts',
    'GRPOMetric',
    'GSPOMetric',
    'LabelFacts',
    'LossMetric',
    'Metric',
    'MetricState',
    'PPOMetric',
    'PPOValueMetric',
    'StepFacts',
    'TrainMetric',
]
