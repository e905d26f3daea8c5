"""Rewards and lengths of completions."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from twinkle.metric.base import ForwardFacts
from twinkle.metric.counting import CountingMetric

_REWARD = 'reward:'
"""Prefix of the totals of rewards."""
_TIMES = {'generate_time': 'profiling/generate_seconds', 'weight_sync_time': 'profiling/weight_sync_seconds'}
"""Reported name of each duration, by the argument of `accumulate`."""


class CompletionRewardMetric(CountingMetric):
    """Reports rewards, completion lengths and durations, given by a training loop or read from features.

    `train/<name>_reward` and `train/<name>_reward_std` are the mean and the sample standard deviation of each kind of
    reward; `train/completion_length` is a mean, as are `profiling/generate_seconds` and
    `profiling/weight_sync_seconds`. If features have the stream `rewards`, with the same number at each label of a
    completion, this number is the reward `total`. The length of the completion is then its number of labels.
    """

    units: ClassVar = {
        'train/completion_length': 'tokens',
        'profiling/generate_seconds': 's',
        'profiling/weight_sync_seconds': 's',
        'train/total_reward': 'reward',
        'train/total_reward_std': 'reward',
    }
    optional_streams: ClassVar = ('rewards',)
    wall_clock_values: ClassVar = frozenset(_TIMES.values())

    def accumulate(
        self,
        facts: ForwardFacts | None = None,
        outputs: None = None,
        *,
        rewards: Mapping[str, Sequence[float]] | None = None,
        completion_lengths: Sequence[int] = (),
        generate_time: float | None = None,
        weight_sync_time: float | None = None,
    ) -> None:
        """Add the results of a batch, or measurements of a loop.

        Args:
            facts: results of a batch.
            outputs: must be None; loops that pass inputs and outputs to every metric pass None for both.
            rewards: one number per completion, by the name of the reward.
            completion_lengths: lengths in tokens.
            generate_time: seconds spent on sampling.
            weight_sync_time: seconds spent on transferring the weights to the sampler.

        Raises:
            TypeError: inputs or outputs were given, which this metric does not read.
        """
        if outputs is not None or not isinstance(facts, ForwardFacts | None):
            raise TypeError('inputs and outputs are not supported: pass None, and use rewards= and completion_lengths=')
        if facts is not None and facts.labels is not None and 'rewards' in facts.labels.streams:
            _, begins, lengths = np.unique(facts.labels.features_R, return_index=True, return_counts=True)
            self.add_moments(f'{_REWARD}total', facts.labels.streams['rewards'][begins].astype(np.float64))
            self.add_moments('length', lengths.astype(np.float64))
        for name, values in (rewards or {}).items():
            self.add_moments(f'{_REWARD}{name}', np.asarray(values, np.float64))
        self.add_moments('length', np.asarray(completion_lengths, np.float64))
        for name, seconds in (('generate_time', generate_time), ('weight_sync_time', weight_sync_time)):
            if seconds is not None:
                self.add_moments(name, np.array([seconds], np.float64))

    def calculate(self) -> dict[str, float]:
        values = {
            report_name: self.total(f'{name}.mean')
            for name, report_name in _TIMES.items()
            if self.total(f'{name}.count')
        }
        for key in self.state():
            if key.startswith(_REWARD) and key.endswith('.count'):
                name = key.removeprefix(_REWARD).removesuffix('.count')
                values[f'train/{name}_reward'] = self.total(f'{_REWARD}{name}.mean')
                values[f'train/{name}_reward_std'] = self.variance(f'{_REWARD}{name}', is_sample=True) ** 0.5
        if self.total('length.count'):
            values['train/completion_length'] = self.total('length.mean')
        return values
