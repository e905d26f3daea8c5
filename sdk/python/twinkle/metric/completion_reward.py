"""What completions earned and how long they were."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from twinkle.metric.base import ForwardFacts
from twinkle.metric.counting import CountingMetric

_REWARD = 'reward:'
_TIMES = {'generate_time': 'profiling/generate_seconds', 'weight_sync_time': 'profiling/weight_sync_seconds'}


class CompletionRewardMetric(CountingMetric):
    """Reports rewards and completions, from what a loop says or from what features carry.

    `train/<name>_reward` and `train/<name>_reward_std`: mean and standard deviation (of a sample) of each kind of
    reward. `train/completion_length`. `profiling/generate_seconds` and `profiling/weight_sync_seconds`, means.
    Features that carry `rewards`, the same number at each label of a completion, count as rewards `total`, and
    their labels as the completion's length.
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
        """Take in a batch, or what a loop measured.

        Args:
            facts: of a batch.
            outputs: nothing; loops that call every metric with inputs and outputs give None for both.
            rewards: one number for each completion, by the name of the reward.
            completion_lengths: in tokens.
            generate_time: seconds that sampling took.
            weight_sync_time: seconds until the sampler had the weights.

        Raises:
            TypeError: inputs or outputs are given, which this metric does not read.
        """
        if outputs is not None or not isinstance(facts, ForwardFacts | None):
            raise TypeError('inputs and outputs are not read here: give None, and rewards= and completion_lengths=')
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
        """Return the numbers."""
        values = {shown: self.total(f'{name}.mean') for name, shown in _TIMES.items() if self.total(f'{name}.count')}
        for key in self.state():
            if key.startswith(_REWARD) and key.endswith('.count'):
                name = key.removeprefix(_REWARD).removesuffix('.count')
                values[f'train/{name}_reward'] = self.total(f'{_REWARD}{name}.mean')
                values[f'train/{name}_reward_std'] = self.variance(f'{_REWARD}{name}', is_sample=True) ** 0.5
        if self.total('length.count'):
            values['train/completion_length'] = self.total('length.mean')
        return values
