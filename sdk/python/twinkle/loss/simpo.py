"""Simple Preference Optimization."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import LossBatch
from twinkle.loss.options import check_number
from twinkle.loss.pairs import PairLoss, check_pairs, preference_nll


class SimPOLoss(PairLoss):
    """`-log sigmoid(beta (mean log p(chosen) - mean log p(rejected)) - gamma)`, arXiv 2405.14734, equation 6.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of pairs. For metrics see `PairLoss`; rewards are
    beta times the mean log-probability.

    Args:
        beta: scale of the rewards, above 0.
        gamma: target margin between chosen and rejected, at least 0.
        ignore_index: label value to ignore, in addition to -100.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, beta: float = 2.5, gamma: float = 0.5, ignore_index: int = IGNORE_INDEX) -> None:
        super().__init__(ignore_index)
        self.beta = check_number('beta', beta, low=0.0, is_low_allowed=False)
        self.gamma = check_number('gamma', gamma, low=0.0)

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the sum over pairs.

        Raises:
            InvalidLossInput: a response of a pair has no labels.
        """
        check_pairs(batch)
        chosen_P, rejected_P = self.response_logps(batch, self.beta * batch.logps_R, is_mean=True)
        return self.outcome(preference_nll(chosen_P - rejected_P - self.gamma), (chosen_P, rejected_P))
