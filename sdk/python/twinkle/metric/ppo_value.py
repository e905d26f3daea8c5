"""Accuracy of a value head's predictions.

Legend: R is the number of labels.
"""

from typing import ClassVar

import numpy as np

from twinkle.metric.base import ForwardFacts
from twinkle.metric.counting import CountingMetric
from twinkle.metric.grpo import checked_range


class PPOValueMetric(CountingMetric):
    """Reports the quality of PPO's critic, over batches whose features have the stream `returns`.

    - Always: `train/value_mean`, `train/return_mean`, and `train/explained_variance`, which is 1 minus the ratio of the
      variances of the error and of the returns; it is omitted if all returns are equal.
    - With `old_values`: `train/value_clip_ratio`, the fraction of values further than `epsilon` from the old values.
    - With `advantages`: `train/advantage_mean` and `train/advantage_std`.

    Args:
        epsilon: clip range of the value loss, positive.

    Raises:
        ValueError: the range is not positive.
    """

    units: ClassVar = {
        'train/value_mean': 'reward',
        'train/return_mean': 'reward',
        'train/explained_variance': 'ratio',
        'train/value_clip_ratio': 'ratio',
        'train/advantage_mean': 'reward',
        'train/advantage_std': 'reward',
    }
    required_outputs: ClassVar = ('values',)
    optional_streams: ClassVar = ('returns', 'old_values', 'advantages')

    def __init__(self, epsilon: float = 0.2) -> None:
        self.epsilon = checked_range('epsilon', epsilon)
        super().__init__()

    def accumulate(self, facts: ForwardFacts) -> None:
        labels = facts.labels
        if labels is None or labels.values_R is None or 'returns' not in labels.streams or not len(labels.values_R):
            return
        values_R = labels.values_R.astype(np.float64)
        returns_R = labels.streams['returns'].astype(np.float64)
        self.add('values', float(values_R.sum()))
        self.add_moments('return', returns_R)
        self.add_moments('error', returns_R - values_R)
        if 'old_values' in labels.streams:
            is_clipped_R = np.abs(values_R - labels.streams['old_values']) > self.epsilon
            self.add('clipped', int(is_clipped_R.sum()))
            self.add('clippable', len(is_clipped_R))
        if 'advantages' in labels.streams:
            self.add_moments('advantage', labels.streams['advantages'].astype(np.float64))

    def calculate(self) -> dict[str, float]:
        values = self.means({'train/value_mean': 'values'}, by='return.count')
        if not values:
            return {}
        values['train/return_mean'] = self.total('return.mean')
        if self.variance('return'):
            values['train/explained_variance'] = 1.0 - self.variance('error') / self.variance('return')
        values |= self.means({'train/value_clip_ratio': 'clipped'}, by='clippable')
        if self.total('advantage.count'):
            values['train/advantage_mean'] = self.total('advantage.mean')
            values['train/advantage_std'] = self.variance('advantage') ** 0.5
        return values
