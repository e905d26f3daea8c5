"""Distance of a policy from the sampling policy, per token.

Legend: R is the number of labels.
"""

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from twinkle.metric.base import ForwardFacts, LabelFacts
from twinkle.metric.counting import CountingMetric

Doubles = npt.NDArray[np.float64]
_LARGEST_EXPONENT = 700.0
"""Limit of exponents; float64 overflows slightly above."""


class GRPOMetric(CountingMetric):
    """Reports the current probabilities of the sampled tokens, compared with earlier probabilities.

    - Always: `train/mean_new_logp`, and `train/policy_confidence`, which is its exponential.
    - If the pass computed entropies, for a loss or because of `is_entropy_measured`: `train/entropy`, the mean over
      labels.
    - With `old_logps`: `train/mean_old_logp`, `train/logp_diff_mean`, `train/approx_kl` (the estimator k3 of the
      divergence of old from new: Schulman 2020, "Approximating KL Divergence"), `train/token_kl_max`,
      `train/token_ratio_mean` and `train/token_ratio_max`.
    - With `old_logps` and `advantages`: `train/clip_ratio_low`, the fraction of tokens with a ratio below `1 - epsilon`
      and a negative advantage; `train/clip_ratio_high`, the fraction with a ratio above `1 + epsilon_high` and a
      positive advantage; and their sum `train/clip_ratio`. PPO's gradient is zero for these tokens (arXiv:1707.06347,
      eq. 7).
    - With `ref_logps`: `train/ref_kl`, k3 of the divergence of new from the reference.
    - With `sampler_logps`: `train/sampler_kl`, k3 of the divergence of the sampling engine from new, and
      `train/sampler_ratio_max`.

    Args:
        epsilon: lower clip range, positive.
        epsilon_high: upper clip range; `epsilon` if unset.
        is_entropy_measured: whether to request entropies from each pass. The backward pass then recomputes the
            head's blocks, as for a loss with `entropy_coef`.

    Raises:
        ValueError: a range is not positive.
    """

    units: ClassVar = {
        'train/mean_new_logp': 'nats',
        'train/mean_old_logp': 'nats',
        'train/policy_confidence': 'ratio',
        'train/entropy': 'nats',
        'train/logp_diff_mean': 'nats',
        'train/approx_kl': 'nats',
        'train/token_kl_max': 'nats',
        'train/token_ratio_mean': 'factor',
        'train/token_ratio_max': 'factor',
        'train/ref_kl': 'nats',
        'train/sampler_kl': 'nats',
        'train/sampler_ratio_max': 'factor',
        'train/clip_ratio': 'ratio',
        'train/clip_ratio_low': 'ratio',
        'train/clip_ratio_high': 'ratio',
    }
    optional_streams: ClassVar = ('old_logps', 'advantages', 'ref_logps', 'sampler_logps')

    def __init__(
        self, epsilon: float = 0.2, epsilon_high: float | None = None, *, is_entropy_measured: bool = False
    ) -> None:
        self.epsilon = checked_range('epsilon', epsilon)
        self.epsilon_high = checked_range('epsilon_high', epsilon if epsilon_high is None else epsilon_high)
        if is_entropy_measured:
            self.required_outputs = ('entropies',)
        super().__init__()

    def accumulate(self, facts: ForwardFacts) -> None:
        labels = facts.labels
        if labels is None or not len(labels.logps_R):
            return
        new_R = labels.logps_R.astype(np.float64)
        self.add('labels', len(new_R))
        self.add('new', float(new_R.sum()))
        if labels.entropies_R is not None:
            self.add('entropy', float(labels.entropies_R.astype(np.float64).sum()))
            self.add('entropy_labels', len(new_R))
        if 'ref_logps' in labels.streams:
            self.add('ref_kl', float(_k3(labels.streams['ref_logps'] - new_R).sum()))
            self.add('ref_labels', len(new_R))
        if 'sampler_logps' in labels.streams:
            self._add_sampler(new_R - labels.streams['sampler_logps'])
        if 'old_logps' in labels.streams:
            self._add_ratios(labels, new_R - labels.streams['old_logps'])

    def calculate(self) -> dict[str, float]:
        values = self.means({'train/mean_new_logp': 'new'}, by='labels')
        if values:
            values['train/policy_confidence'] = math.exp(values['train/mean_new_logp'])
        values |= self.means({'train/entropy': 'entropy'}, by='entropy_labels')
        values |= self.means({'train/ref_kl': 'ref_kl'}, by='ref_labels')
        values |= self.means({'train/sampler_kl': 'sampler_kl'}, by='sampler_labels')
        if self.total('sampler_labels'):
            values['train/sampler_ratio_max'] = self.total('sampler_ratio_max')
        values |= self.means({'train/token_ratio_mean': 'ratio'}, by='ratio_labels')
        old_means = {'train/mean_old_logp': 'old', 'train/logp_diff_mean': 'diff', 'train/approx_kl': 'kl'}
        values |= self.means(old_means, by='old_labels')
        if self.total('old_labels'):
            values['train/token_kl_max'] = self.total('kl_max')
            values['train/token_ratio_max'] = self.total('ratio_max')
        shares = self.means({'low': 'clipped_low', 'high': 'clipped_high'}, by='clippable')
        if shares:
            values |= {f'train/clip_ratio_{side}': share for side, share in shares.items()}
            values['train/clip_ratio'] = shares['low'] + shares['high']
        return values

    def clipped(
        self, log_ratios_R: Doubles, advantages_R: npt.NDArray[Any], features_R: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return masks of the units (here tokens) that are clipped below and above the range."""
        ratios_R = _exp(log_ratios_R)
        return (
            (ratios_R < 1.0 - self.epsilon) & (advantages_R < 0),
            (ratios_R > 1.0 + self.epsilon_high) & (advantages_R > 0),
        )

    def _add_sampler(self, log_ratios_R: Doubles) -> None:
        self.add('sampler_labels', len(log_ratios_R))
        self.add('sampler_kl', float(_k3(log_ratios_R).sum()))
        self.raise_to('sampler_ratio_max', float(_exp(log_ratios_R).max()))

    def _add_ratios(self, labels: LabelFacts, log_ratios_R: Doubles) -> None:
        kl_R = _k3(log_ratios_R)
        self.add('old_labels', len(kl_R))
        self.add('old', float(labels.streams['old_logps'].astype(np.float64).sum()))
        self.add('diff', float(log_ratios_R.sum()))
        self.add('kl', float(kl_R.sum()))
        self.add('ratio', float(_exp(log_ratios_R).sum()))
        self.add('ratio_labels', len(kl_R))
        self.raise_to('kl_max', float(kl_R.max()))
        self.raise_to('ratio_max', float(_exp(log_ratios_R).max()))
        if 'advantages' in labels.streams:
            low, high = self.clipped(log_ratios_R, labels.streams['advantages'], labels.features_R)
            self.add('clipped_low', int(low.sum()))
            self.add('clipped_high', int(high.sum()))
            self.add('clippable', len(low))


def checked_range(name: str, value: float) -> float:
    """Return a positive option, such as a clip range, as a float.

    Raises:
        ValueError: the value is not a positive number.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < math.inf:
        raise ValueError(f'{name} must be a positive number, got {value!r}')
    return float(value)


def _exp(values: Doubles) -> Doubles:
    return np.exp(np.minimum(values, _LARGEST_EXPONENT))


def _k3(log_ratios: Doubles) -> Doubles:
    return _exp(log_ratios) - log_ratios - 1.0
