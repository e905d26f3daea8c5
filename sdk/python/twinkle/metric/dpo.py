"""Preference metrics of chosen and rejected responses."""

from typing import ClassVar

import numpy as np

from twinkle.metric.base import ForwardFacts
from twinkle.metric.counting import CountingMetric
from twinkle.metric.grpo import checked_range


class DPOMetric(CountingMetric):
    """Reports preferences in pairs of features, the chosen response first: features 0 and 1, 2 and 3, and so on.

    The values are means over pairs. A pair is skipped if one of its features has no label or if its second feature is
    missing.

    - Always: `logps/chosen` and `logps/rejected`, the log-probabilities of whole responses.
    - With `ref_logps`: `logps/ref_chosen` and `logps/ref_rejected`, the log-probabilities under the reference model;
      `rewards/chosen` and `rewards/rejected`, the implicit rewards `beta (log p - ref_logps)` (Rafailov et al. 2023,
      arXiv:2305.18290, eq. 5 without the constant); `rewards/margins`, the chosen minus the rejected reward; and
      `rewards/accuracies`, the fraction of pairs with a positive margin.

    Args:
        beta: beta of the loss, positive.

    Raises:
        ValueError: beta is not positive.
    """

    units: ClassVar = {
        'logps/chosen': 'nats',
        'logps/rejected': 'nats',
        'logps/ref_chosen': 'nats',
        'logps/ref_rejected': 'nats',
        'rewards/chosen': 'nats',
        'rewards/rejected': 'nats',
        'rewards/margins': 'nats',
        'rewards/accuracies': 'ratio',
    }
    optional_streams: ClassVar = ('ref_logps',)

    def __init__(self, beta: float = 0.1) -> None:
        self.beta = checked_range('beta', beta)
        super().__init__()

    def accumulate(self, facts: ForwardFacts) -> None:
        labels = facts.labels
        if labels is None or not len(labels.logps_R):
            return
        present, begins = np.unique(labels.features_R, return_index=True)
        rows = {int(feature): index for index, feature in enumerate(present)}
        pairs = [(rows[index], rows[index + 1]) for index in rows if index % 2 == 0 and index + 1 in rows]
        if not pairs:
            return
        chosen, rejected = np.array(pairs).T
        sums = np.add.reduceat(labels.logps_R.astype(np.float64), begins)
        self.add('pairs', len(pairs))
        self.add('chosen', float(sums[chosen].sum()))
        self.add('rejected', float(sums[rejected].sum()))
        if 'ref_logps' in labels.streams:
            refs = np.add.reduceat(labels.streams['ref_logps'].astype(np.float64), begins)
            gains = self.beta * (sums - refs)
            margins = gains[chosen] - gains[rejected]
            self.add('ref_pairs', len(pairs))
            self.add('ref_chosen', float(refs[chosen].sum()))
            self.add('ref_rejected', float(refs[rejected].sum()))
            self.add('chosen_gain', float(gains[chosen].sum()))
            self.add('rejected_gain', float(gains[rejected].sum()))
            self.add('margin', float(margins.sum()))
            self.add('right', int((margins > 0).sum()))

    def calculate(self) -> dict[str, float]:
        reference_means = {
            'logps/ref_chosen': 'ref_chosen',
            'logps/ref_rejected': 'ref_rejected',
            'rewards/chosen': 'chosen_gain',
            'rewards/rejected': 'rejected_gain',
            'rewards/margins': 'margin',
            'rewards/accuracies': 'right',
        }
        return {
            **self.means({'logps/chosen': 'chosen', 'logps/rejected': 'rejected'}, by='pairs'),
            **self.means(reference_means, by='ref_pairs'),
        }
