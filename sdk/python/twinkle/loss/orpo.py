"""Odds Ratio Preference Optimization."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import LossBatch
from twinkle.loss.options import check_number
from twinkle.loss.pairs import PairLoss, check_pairs, log1mexp, preference_nll
from twinkle.loss.reporting import mean_of


class ORPOLoss(PairLoss):
    """`- mean log p(chosen) - lambda_orpo * log sigmoid(log odds(chosen) - log odds(rejected))`.

    arXiv 2403.07691, equations 6 and 7, with odds `P / (1 - P)` of `P = exp(mean log p)` (equations 3 and 4).

    The divisor of the loss (`LossOutput.num_tokens`) is the number of pairs. For metrics see `PairLoss`; rewards are
    the log odds. `sft_loss` is the chosen response's negative log-probability per label, in nats.

    Args:
        lambda_orpo: factor of the odds-ratio term, at least 0.
        ignore_index: label value to ignore, in addition to -100.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, lambda_orpo: float = 0.1, ignore_index: int = IGNORE_INDEX) -> None:
        super().__init__(ignore_index)
        self.lambda_orpo = check_number('lambda_orpo', lambda_orpo, low=0.0)

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the sum over pairs.

        Raises:
            InvalidLossInput: a response of a pair has no labels.
        """
        check_pairs(batch)
        chosen_P, rejected_P = self.response_logps(batch, batch.logps_R, is_mean=True)
        odds = (chosen_P - log1mexp(chosen_P), rejected_P - log1mexp(rejected_P))
        losses_P = self.lambda_orpo * preference_nll(odds[0] - odds[1]) - chosen_P
        return self.outcome(losses_P, odds, {'sft_loss': -mean_of(chosen_P)})
