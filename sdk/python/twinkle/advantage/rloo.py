"""Advantages of REINFORCE with a leave-one-out baseline (RLOO)."""

from collections.abc import Sequence

import numpy.typing as npt

from twinkle.advantage.base import FloatVector, GroupAdvantage, Scale


class RLOOAdvantage(GroupAdvantage):
    """Difference between each reward and the mean of the other rewards of its group.

    Ahmadian et al. 2024 (arXiv 2402.14740), section 2.2: `r_i - sum_{j != i} r_j / (k - 1)`. A reward is not part of
    its own baseline, so the estimate is unbiased. `scale` defaults to 'none', because division by a standard deviation
    would add a bias.
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
