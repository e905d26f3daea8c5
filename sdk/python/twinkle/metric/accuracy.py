"""Accuracy of greedy predictions."""

from typing import ClassVar

from twinkle.metric.base import ForwardFacts
from twinkle.metric.counting import CountingMetric


class Accuracy(CountingMetric):
    """Reports `accuracy`, the fraction of labels that are the most likely token given the tokens before them."""

    units: ClassVar = {'accuracy': 'ratio'}
    required_outputs: ClassVar = ('is_greedy',)

    def accumulate(self, facts: ForwardFacts) -> None:
        if facts.labels is not None and facts.labels.is_greedy_R is not None:
            self.add('hits', int(facts.labels.is_greedy_R.sum()))
            self.add('labels', len(facts.labels.is_greedy_R))

    def calculate(self) -> dict[str, float]:
        return self.means({'accuracy': 'hits'}, by='labels')
