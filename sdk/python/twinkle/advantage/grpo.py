"""Group relative policy optimization."""

from twinkle.advantage.base import FloatVector, GroupAdvantage


class GRPOAdvantage(GroupAdvantage):
    """How far each reward is from its group's mean, in standard deviations.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision: `(r_i - mean(r)) / std(r)`, with the standard
    deviation of a sample. With `scale='none'` it is that of Dr. GRPO (arXiv 2503.20783), without the division.
    """

    def centre(self, rewards_PG: FloatVector) -> FloatVector:
        """Return rewards less the means of their groups."""
        return rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
