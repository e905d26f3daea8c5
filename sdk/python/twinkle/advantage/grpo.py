"""Advantages of group relative policy optimization (GRPO)."""

from twinkle.advantage.base import FloatVector, GroupAdvantage


class GRPOAdvantage(GroupAdvantage):
    """Difference between each reward and the mean of its group, in standard deviations.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision: `(r_i - mean(r)) / std(r)`, with the sample
    standard deviation. `scale='none'` gives the undivided advantages of Dr. GRPO (arXiv 2503.20783).
    """

    def centre(self, rewards_PG: FloatVector) -> FloatVector:
        """Return rewards minus the mean of their group."""
        return rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
