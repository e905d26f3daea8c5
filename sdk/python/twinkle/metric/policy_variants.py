"""Variants of `GRPOMetric` for PPO, GSPO and CISPO.

Legend: R labels, S features with labels.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.metric.grpo import Doubles, GRPOMetric

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class PPOMetric(GRPOMetric):
    """`GRPOMetric` under PPO's name; both clip per token (arXiv:1707.06347, eq. 7)."""


class GSPOMetric(GRPOMetric):
    """`GRPOMetric` with GSPO's clipping of whole sequences by the geometric mean of their ratios.

    Zheng et al. 2025, arXiv:2507.18071, eq. 7. A sequence's advantage is the mean over its tokens.
    """

    def clipped(self, log_ratios_R: Doubles, advantages_R: npt.NDArray[Any], features_R: Ints) -> tuple[Bools, Bools]:
        """Return masks of the sequences that are clipped below and above the range."""
        _, begins_S = np.unique(features_R, return_index=True)
        lengths_S = np.diff(begins_S, append=len(features_R))
        ratios_S = np.add.reduceat(log_ratios_R, begins_S) / lengths_S
        advantages_S = np.add.reduceat(advantages_R.astype(np.float64), begins_S) / lengths_S
        return super().clipped(ratios_S, advantages_S, features_R)


class CISPOMetric(GRPOMetric):
    """`GRPOMetric` with CISPO's clipping, which does not depend on the sign of the advantage.

    MiniMax 2025, arXiv:2506.13585, eq. 5.
    """

    def clipped(self, log_ratios_R: Doubles, advantages_R: npt.NDArray[Any], features_R: Ints) -> tuple[Bools, Bools]:
        """Return masks of the tokens that are clipped below and above the range."""
        below, _ = super().clipped(log_ratios_R, np.full_like(log_ratios_R, -1.0), features_R)
        _, above = super().clipped(log_ratios_R, np.full_like(log_ratios_R, 1.0), features_R)
        return below, above
