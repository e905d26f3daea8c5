"""Contrastive Preference Optimization."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import LossBatch
from twinkle.loss.options import check_number
from twinkle.loss.pairs import PairLoss, check_pairs, preference_nll
from twinkle.loss.reporting import mean_of


class CPOLoss(PairLoss):
    """`-log sigmoid(beta (log p(chosen) - log p(rejected))) - bc_coef * mean log p(chosen)`.

    arXiv 2401.08417, equation 5: a preference term without a reference model, plus behavior cloning of the chosen
    response. Cloning is averaged per label and then over pairs, so that long responses do not outweigh the preference.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of pairs. For metrics see `PairLoss`; rewards are
    beta times the log-probability. `sft_loss` is the chosen response's negative log-probability per label, in nats.

    Args:
        beta: scale of the rewards, above 0.
        bc_coef: factor of the cloning term, at least 0.
        ignore_index: label value to ignore, in addition to -100.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, beta: float = 0.1, bc_coef: float = 1.0, ignore_index: int = IGNORE_INDEX) -> None:
        super().__init__(ignore_index)
        self.beta = check_number('beta', beta, low=0.0, is_low_allowed=False)
        self.bc_coef = check_number('bc_coef', bc_coef, low=0.0)

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the sum over pairs.

        Raises:
            InvalidLossInput: a response of a pair has no labels.
        """
        check_pairs(batch)
        chosen_P, rejected_P = self.response_logps(batch, self.beta * batch.logps_R)
        nll_P = -self.response_logps(batch, batch.logps_R, is_mean=True)[0]
        losses_P = preference_nll(chosen_P - rejected_P) + self.bc_coef * nll_P
        return self.outcome(losses_P, (chosen_P, rejected_P), {'sft_loss': mean_of(nll_P)})
