"""Similarity of anchor embeddings with positives and negatives.

Legend: F features, G groups, D hidden size.
"""

from typing import ClassVar

import numpy as np

from twinkle.metric.base import ForwardFacts
from twinkle.metric.counting import CountingMetric


class EmbeddingMetric(CountingMetric):
    """Reports cosine similarities of groups of features: anchor, positive, then hard negatives if there are any.

    `pos_sim`, `pos_sim_min` and `pos_sim_max` are the mean, minimum and maximum similarity of an anchor and its
    positive. `neg_sim` is the mean similarity over all pairs of an anchor with the positive of another group or
    with a hard negative of the same group.

    Args:
        group_size: number of features per group, at least 2; an incomplete last group is skipped.

    Raises:
        ValueError: the size is out of range.
    """

    units: ClassVar = {'pos_sim': 'cosine', 'pos_sim_min': 'cosine', 'pos_sim_max': 'cosine', 'neg_sim': 'cosine'}
    required_outputs: ClassVar = ('embeddings',)

    def __init__(self, group_size: int = 2) -> None:
        if isinstance(group_size, bool) or group_size != int(group_size) or group_size < 2:
            raise ValueError(f'group_size must be an integer of at least 2, got {group_size!r}')
        self.group_size = int(group_size)
        super().__init__()

    def accumulate(self, facts: ForwardFacts) -> None:
        if facts.labels is None or facts.labels.embeddings_FD is None:
            return
        embeddings_FD = facts.labels.embeddings_FD.astype(np.float64)
        count = len(embeddings_FD) // self.group_size
        if not count:
            return
        norms_F1 = np.linalg.norm(embeddings_FD, axis=1, keepdims=True)
        units_FD = embeddings_FD / np.where(norms_F1 > 0.0, norms_F1, 1.0)
        groups = units_FD[: count * self.group_size].reshape(count, self.group_size, -1)
        anchors_GD, positives_GD, hard = groups[:, 0], groups[:, 1], groups[:, 2:]
        similarities_GG = anchors_GD @ positives_GD.T
        own_G = np.diagonal(similarities_GG)
        self.add('pairs', count)
        self.add('positive', float(own_G.sum()))
        self.raise_to('positive_max', float(own_G.max()))
        self.raise_to('positive_min_negated', -float(own_G.min()))
        self.add('negatives', count * (count - 1) + count * (self.group_size - 2))
        self.add('negative', float(similarities_GG.sum() - own_G.sum()))
        self.add('negative', float((anchors_GD[:, None] * hard).sum()))

    def calculate(self) -> dict[str, float]:
        values = self.means({'pos_sim': 'positive'}, by='pairs')
        if values:
            values['pos_sim_min'] = -self.total('positive_min_negated')
            values['pos_sim_max'] = self.total('positive_max')
        return {**values, **self.means({'neg_sim': 'negative'}, by='negatives')}
