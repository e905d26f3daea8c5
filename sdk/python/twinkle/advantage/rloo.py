"""REINFORCE with a leave-one-out baseline."""

from collections.abc import Sequence

import numpy.typing as npt

from twinkle.advantage.base import FloatVector, GroupAdvantage, Scale


class RLOOAdvantage(GroupAdvantage):
    """Distance of each reward from the mean of the other rewards of its group.

    Ahmadian et al. 2024 (arXiv 2402.14740), section 2.2: `r_i - sum_{j != i} r_j / (k - 1)`. A reward is not part of
    its own baseline, so the estimate is unbiased. Division by a standard deviation would bias it, so `scale` defaults
    to 'none'.
    """

    def centre(self, rewards_PG: FloatVector) -> FloatVector:
        """Return rewards minus the mean of the others in their group."""
        count = rewards_PG.shape[1]
        return rewards_PG - (rewards_PG.sum(axis=1, keepdims=True) - rewards_PG) / (count - 1)

    def __call__(
        self, rewards: Sequence[float] | npt.ArrayLike, num_generations: int = 1, scale: Scale = 'none'
    ) -> FloatVector:
        """Return one advantage per reward, unscaled by default; see `GroupAdvantage`."""
        return super().__call__(rewards, num_generations, scale)
