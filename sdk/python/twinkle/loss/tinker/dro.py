"""The `dro` loss of the Tinker API: a policy objective with a quadratic penalty on the log-ratio."""

from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.options import check_number
from twinkle.loss.tinker.base import TinkerPolicyLoss


class TinkerDRO(TinkerPolicyLoss):
    """`- sum of w (A log p - beta / 2 (log r)^2)`, where r is `exp(log p - old_logps)`.

    w is the weight of a label, and A its advantage.

    Args:
        beta: at least 0. Tinker publishes no default; its documentation uses 0.05 in an example.

    Raises:
        ValueError: beta is out of range.
    """

    def __init__(self, beta: float = 0.05) -> None:
        self.beta = check_number('beta', beta, low=0.0)

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R], the negated objective."""
        objective_R = batch.logps_R * batch.stream('advantages')
        return 0.5 * self.beta * self.log_ratio(batch).square() - objective_R
