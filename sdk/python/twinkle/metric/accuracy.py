"""How often the likeliest token is the label."""

from typing import ClassVar

from twinkle.metric.base import ForwardFacts
from twinkle.metric.counting import CountingMetric


class Accuracy(CountingMetric):
    """Reports `accuracy`, the share of labels that greedy decoding would have chosen, given what stands before them."""

    units: ClassVar = {'accuracy': 'ratio'}
    required_outputs: ClassVar = ('is_greedy',)

    def accumulate(self, facts: ForwardFacts) -> None:
        """Take in a batch."""
        if facts.labels is not None and facts.labels.is_greedy_R is not None:
            self.add('hits', int(facts.labels.is_greedy_R.sum()))
            self.add('labels', len(facts.labels.is_greedy_R))

    def calculate(self) -> dict[str, float]:
        """Return the share."""
        return self.means({'accuracy': 'hits'}, by='labels')
