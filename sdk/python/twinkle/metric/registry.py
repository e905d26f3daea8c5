"""Registry of metrics."""

from twinkle.component import ComponentRegistry
from twinkle.metric.accuracy import Accuracy
from twinkle.metric.base import Metric
from twinkle.metric.completion_reward import CompletionRewardMetric
from twinkle.metric.dpo import DPOMetric
from twinkle.metric.embedding import EmbeddingMetric
from twinkle.metric.grpo import GRPOMetric
from twinkle.metric.loss_metric import LossMetric
from twinkle.metric.policy_variants import CISPOMetric, GSPOMetric, PPOMetric
from twinkle.metric.ppo_value import PPOValueMetric
from twinkle.metric.train_metric import TrainMetric

METRICS = ComponentRegistry(
    'metric',
    Metric,
    (
        Accuracy,
        CISPOMetric,
        CompletionRewardMetric,
        DPOMetric,
        EmbeddingMetric,
        GRPOMetric,
        GSPOMetric,
        LossMetric,
        PPOMetric,
        PPOValueMetric,
        TrainMetric,
    ),
)
"""Registered metrics by name."""
