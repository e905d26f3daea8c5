"""REINFORCE with a leave-one-out baseline."""

from collections.abc import Sequence

import numpy.typing as npt

from twinkle.advantage.base import FloatVector, GroupAdvantage, Scale


class RLOOAdvantage(GroupAdvantage):
    """How far each reward is from the mean of the others of its group.

    Ahmadian et al. 2024 (arXiv 2402.14740), section 2.2: `r_i - sum_{j != i} r_j / (k - 1)`. No reward is part of its
    own baseline, so that the estimate has no bias; dividing by a standard deviation would give it one, so nothing is
    divided unless `scale` asks for it.
    """

    def centre(self, rewards_PG: FloatVector) -> FloatVector:
        """Return rewards less the means of the others."""
        count = rewards_PG.shape[1]
        return rewards_PG - (rewards_PG.sum(axis=1, keepdims=True) - rewards_PG) / (count - 1)

    def __call__(
        self, rewards: Sequence[float] | npt.ArrayLike, num_generations: int = 1, scale: Scale = 'none'
    ) -> FloatVector:
        """Return one advantage for each reward, as `GroupAdvantage` does, but unscaled unless told otherwise."""
        return super().__call__(rewards, num_generations, scale)
